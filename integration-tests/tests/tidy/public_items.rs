//! What a crate shows to others is used by others: every public item that can be reached from outside is named outside.

use std::collections::{BTreeMap, BTreeSet};

use crate::rules::Violation;
use crate::source::SourceFile;

const ITEMS: [&str; 7] = ["fn", "struct", "enum", "const", "static", "type", "trait"];
/// Words that may stand between `pub` and the kind of an item.
const BEFORE_ITEMS: [&str; 3] = ["async", "unsafe", "extern"];

/// Items of public modules and re-exports that no file outside the crate names. Tests, benches and examples of a crate are outside.
/// A type that another public item shows (in a signature or a field) need not be named.
pub fn violations(files: &[SourceFile]) -> Vec<Violation> {
    let mut words: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
    for file in files {
        let seen = words.entry(side(file)).or_default();
        seen.extend(identifiers(&file.code));
    }
    let mut shown: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
    for file in files {
        shown.entry(side(file)).or_default().extend(shown_types(&file.product));
    }
    let public = public_modules(files);
    let mut found = Vec::new();
    for file in files.iter().filter(|file| public.contains(file.path.as_str())) {
        let own = side(file);
        let is_used = |name: &str| words.iter().any(|(side, words)| *side != own && words.contains(name));
        let is_shown = |name: &str| shown.get(&own).is_some_and(|shown| shown.contains(name));
        for (line, name) in public_items(&file.product) {
            if !is_used(name) && !is_shown(name) {
                found.push(format!(
                    "{}:{line}: `{name}` is used by no other crate: make it pub(crate)",
                    file.path
                ));
            }
        }
    }
    found
}

/// A library's files are one side; its program, tests and examples are another.
fn side(file: &SourceFile) -> String {
    match file.path.contains("/src/") && !file.path.ends_with("/src/main.rs") {
        true => file.crate_dir().to_owned(),
        false => format!("{} from outside", file.crate_dir()),
    }
}

/// Types in the signatures and fields of public items. Signatures may go over several lines, until their body begins.
fn shown_types(product: &str) -> BTreeSet<&str> {
    let mut found = BTreeSet::new();
    let (mut in_signature, mut in_trait) = (false, false);
    for line in product.lines() {
        in_trait = (in_trait && line != "}") || line.starts_with("pub trait ");
        let line = line.trim_start();
        let begins = (line.starts_with("pub ") && !line.starts_with("pub use ")) || (in_trait && line.contains("fn "));
        if begins || in_signature || line.starts_with("type ") || line.starts_with("impl") {
            let is_definition =
                begins && ["struct", "enum", "trait", "type"].contains(&identifiers(line).nth(1).unwrap_or(""));
            let types = identifiers(line).skip(if is_definition { 3 } else { 1 });
            found.extend(types.filter(|word| word.starts_with(char::is_uppercase)));
            in_signature = !line.contains(['{', ';']) && (line.contains("fn ") || in_signature);
        } else if line.ends_with("),") || line.ends_with(',') {
            // Variants and fields of enums.
            found.extend(
                identifiers(line)
                    .skip(1)
                    .filter(|word| word.starts_with(char::is_uppercase)),
            );
        }
    }
    found
}

fn identifiers(code: &str) -> impl Iterator<Item = &str> {
    let words = code.split(|c: char| !c.is_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with(|c: char| c.is_alphabetic() || c == '_'))
}

/// Paths of the files that `lib.rs` reaches by `pub mod` alone, itself included.
fn public_modules(files: &[SourceFile]) -> BTreeSet<&str> {
    let by_path: BTreeMap<&str, &SourceFile> = files.iter().map(|file| (file.path.as_str(), file)).collect();
    let mut public = BTreeSet::new();
    let mut open: Vec<&str> = by_path
        .keys()
        .filter(|path| path.ends_with("/src/lib.rs"))
        .copied()
        .collect();
    while let Some(path) = open.pop() {
        let Some(file) = by_path.get(path) else { continue };
        public.insert(file.path.as_str());
        let folder = path
            .strip_suffix("/lib.rs")
            .or_else(|| path.strip_suffix("/mod.rs"))
            .or_else(|| path.strip_suffix(".rs"))
            .unwrap_or(path);
        let modules = file.product.lines().filter_map(|line| line.strip_prefix("pub mod "));
        for name in modules.filter_map(|rest| rest.strip_suffix(';')) {
            let candidates = [format!("{folder}/{name}.rs"), format!("{folder}/{name}/mod.rs")];
            open.extend(
                candidates
                    .iter()
                    .filter_map(|path| by_path.get_key_value(path.as_str()))
                    .map(|(path, _)| *path),
            );
        }
    }
    public
}

/// Lines (from 1) and names of the items and re-exports that are `pub`.
fn public_items(product: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    let mut in_use = false;
    for (line, text) in (1..).zip(product.lines()) {
        let text = text.trim_start();
        if in_use || text.starts_with("pub use ") {
            in_use = !text.contains(';');
            let last = |path: &'_ str| -> Option<usize> { path.rfind("::").map(|at| at + 2) };
            let body = text.strip_prefix("pub use ").unwrap_or(text);
            for part in body.split([',', '{', '}', ';']) {
                let part = part.trim();
                let name = &part[last(part).unwrap_or(0)..];
                let name = name.rsplit(" as ").next().unwrap_or(name);
                if !name.is_empty() && name != "*" && name != "self" && name != "_" {
                    found.push((line, name));
                }
            }
            continue;
        }
        let Some(rest) = text.strip_prefix("pub ") else {
            continue;
        };
        let mut words = rest
            .split(|c: char| !c.is_alphanumeric() && c != '_')
            .filter(|word| !word.is_empty());
        let mut kind = words.next();
        while kind.is_some_and(|word| BEFORE_ITEMS.contains(&word)) {
            kind = words.next();
        }
        if !kind.is_some_and(|kind| ITEMS.contains(&kind)) {
            continue;
        }
        // `const fn`.
        let name = words
            .next()
            .and_then(|word| if word == "fn" { words.next() } else { Some(word) });
        found.extend(name.map(|name| (line, name)));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_item_that_only_its_own_crate_names_is_found() {
        let file = |path: &str, text: &str| SourceFile::new(path, text);
        let files = [
            file(
                "crates/a/src/lib.rs",
                "pub mod open;\nmod shut;\npub use shut::{Kept, Lost};\n",
            ),
            file(
                "crates/a/src/open.rs",
                "pub fn used() {}\npub const fn unused() {}\npub(crate) fn inner() {}\n",
            ),
            file(
                "crates/a/src/shut.rs",
                "pub struct Kept;\npub struct Lost;\npub struct Inner;\n",
            ),
            file("crates/b/src/lib.rs", "fn f() { a::open::used(); let _: a::Kept; }\n"),
        ];
        let found = violations(&files);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("lib.rs:3: `Lost`") || found[1].contains("lib.rs:3: `Lost`"));
        assert!(found.iter().any(|words| words.contains("open.rs:2: `unused`")));
    }
}
