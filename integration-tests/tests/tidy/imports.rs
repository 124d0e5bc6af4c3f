//! The import graph of each crate, file by file, and its cycles between siblings. A folder's own `mod.rs` does not count: it names
//! its children, and they name it.

use std::collections::{BTreeMap, BTreeSet};

use crate::source::SourceFile;

/// Cycles that are there: crate, folder, and the files or folders that import each other. A new one has to be untied, not added.
pub const ALLOWED: &[(&str, &str, &[&str])] = &[
    ("crates/etcd-membership", "", &["entry", "entry_fields"]),
    ("crates/serving-core", "kv", &["prefix", "prefix_log"]),
    ("crates/service-runtime", "", &["metrics", "runtime_tasks"]),
    ("crates/service-runtime", "", &["spans", "telemetry"]),
];

/// A module as its path inside its crate.
type Module = Vec<String>;
/// Crate, folder, and the sorted names of a cycle.
pub type Cycle = (String, String, Vec<String>);

/// Every cycle between siblings in product code.
pub fn cycles(files: &[SourceFile]) -> BTreeSet<Cycle> {
    let mut modules: BTreeMap<(String, Module), &SourceFile> = BTreeMap::new();
    for file in files.iter().filter(|file| !file.is_test_file()) {
        if let Some(module) = module_of(file) {
            modules.insert((file.crate_dir().to_owned(), module), file);
        }
    }
    // Edges between siblings: (crate, folder) to names to the names that they import.
    let mut folders: BTreeMap<(String, Module), BTreeMap<String, BTreeSet<String>>> = BTreeMap::new();
    for ((crate_dir, module), file) in &modules {
        let known = |path: &[String]| modules.contains_key(&(crate_dir.clone(), path.to_vec()));
        for imported in imports(&file.product, module, &known) {
            let common = module.iter().zip(&imported).take_while(|(a, b)| a == b).count();
            if common < module.len() && common < imported.len() {
                let folder = folders
                    .entry((crate_dir.clone(), module[..common].to_vec()))
                    .or_default();
                let names = folder.entry(module[common].clone()).or_default();
                names.insert(imported[common].clone());
            }
        }
    }
    let mut found = BTreeSet::new();
    for ((crate_dir, folder), edges) in &folders {
        for cycle in components(edges) {
            found.insert((crate_dir.clone(), folder.join("/"), cycle));
        }
    }
    found
}

fn module_of(file: &SourceFile) -> Option<Module> {
    let (_, inner) = file.path.split_once("/src/")?;
    let mut parts: Module = inner.strip_suffix(".rs")?.split('/').map(str::to_owned).collect();
    if matches!(parts.last().map(String::as_str), Some("mod" | "lib")) {
        parts.pop();
    }
    (inner != "main.rs").then_some(parts)
}

/// The modules of its own crate that a file names in `use`.
fn imports(code: &str, module: &Module, known: &dyn Fn(&[String]) -> bool) -> BTreeSet<Module> {
    let mut found = BTreeSet::new();
    for (at, _) in code.match_indices("use ") {
        let is_statement = code[..at].chars().next_back().is_none_or(char::is_whitespace);
        let Some(end) = code[at..].find(';').filter(|_| is_statement) else {
            continue;
        };
        for path in expanded(&code[at + 4..at + end]) {
            let absolute = absolute(&path, module, known);
            let longest = absolute.and_then(|path| {
                (0..=path.len())
                    .rev()
                    .map(|n| path[..n].to_vec())
                    .find(|path| known(path))
            });
            found.extend(longest.filter(|imported| imported != module));
        }
    }
    found
}

fn absolute(path: &[String], module: &Module, known: &dyn Fn(&[String]) -> bool) -> Option<Module> {
    match path.first().map(String::as_str)? {
        "crate" => Some(path[1..].to_vec()),
        "self" => Some([&module[..], &path[1..]].concat()),
        "super" => {
            let up = path.iter().take_while(|part| *part == "super").count();
            let base = module.len().checked_sub(up)?;
            Some([&module[..base], &path[up..]].concat())
        }
        first => {
            let child = [&module[..], &[first.to_owned()]].concat();
            known(&child).then(|| [&module[..], path].concat())
        }
    }
}

/// `a::{b, c::d}` as `a::b` and `a::c::d`.
fn expanded(tree: &str) -> Vec<Vec<String>> {
    let tree = tree.trim();
    let Some(open) = tree.find('{') else {
        let plain = tree.split(" as ").next().unwrap_or_default();
        return vec![plain.split("::").map(|part| part.trim().to_owned()).collect()];
    };
    let prefix = tree[..open].split("::").map(str::trim).filter(|part| !part.is_empty());
    let prefix: Vec<String> = prefix.map(str::to_owned).collect();
    let inner = tree[open + 1..]
        .trim_end()
        .strip_suffix('}')
        .unwrap_or(&tree[open + 1..]);
    let (mut depth, mut start, mut found) = (0_usize, 0, Vec::new());
    for (at, letter) in inner.char_indices().chain([(inner.len(), ',')]) {
        match letter {
            '{' => depth += 1,
            '}' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                let part = inner[start..at].trim();
                if !part.is_empty() {
                    found.extend(expanded(part).into_iter().map(|rest| [&prefix[..], &rest[..]].concat()));
                }
                start = (at + 1).min(inner.len());
            }
            _ => {}
        }
    }
    found
}

/// Sets of names that reach each other.
fn components(edges: &BTreeMap<String, BTreeSet<String>>) -> BTreeSet<Vec<String>> {
    let reached = |from: &String| {
        let (mut seen, mut left) = (BTreeSet::new(), vec![from.clone()]);
        while let Some(name) = left.pop() {
            for next in edges.get(&name).into_iter().flatten() {
                if seen.insert(next.clone()) {
                    left.push(next.clone());
                }
            }
        }
        seen
    };
    let reach: BTreeMap<&String, BTreeSet<String>> = edges.keys().map(|name| (name, reached(name))).collect();
    let cyclic = reach.iter().filter(|(name, seen)| seen.contains(**name));
    let cycles = cyclic.map(|(name, seen)| {
        let back = seen
            .iter()
            .filter(|other| reach.get(other).is_some_and(|seen| seen.contains(*name)));
        back.cloned().collect()
    });
    cycles.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cycle_is_found_and_a_parent_is_none() {
        let file = |path: &str, text: &str| SourceFile::new(path, text);
        let files = [
            file("crates/x/src/lib.rs", "mod a; mod b; mod c; pub use a::A;"),
            file("crates/x/src/a.rs", "use crate::{b::B, c}; use super::A;"),
            file("crates/x/src/b/mod.rs", "mod inner; use crate::c::C;"),
            file("crates/x/src/b/inner.rs", "use crate::a::A;"),
            file(
                "crates/x/src/c.rs",
                "use std::fmt; // use crate::a::A;\n#[cfg(test)]\nmod tests { use crate::a::A; }",
            ),
        ];
        let cycle = (
            "crates/x".to_owned(),
            String::new(),
            vec!["a".to_owned(), "b".to_owned()],
        );
        assert_eq!(cycles(&files), BTreeSet::from([cycle]));
    }
}
