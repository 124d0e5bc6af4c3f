//! The rules about words for people: how long a page is, and that each path which a page or a comment cites exists.

use std::collections::BTreeSet;
use std::path::Path;

use crate::rules::Violation;
use crate::source::{all_files, relative};

/// Pages that must fit a reader's patience, with the most lines that each may have.
pub const PAGE_LINES_MAX: &[(&str, usize)] = &[("README.md", 90), ("ARCHITECTURE.md", 250)];

/// A word that starts with one of these is a path, whatever its end. (`coordinator/` and `proto/` are not here, because
/// prose such as "coordinator/node" starts like them: of these two only files are checked.)
const FOLDERS: &[&str] = &[
    "crates/",
    "deploy/",
    "docs/",
    "integration-tests/",
    "scripts/",
    "prefill-node/",
    "decode-node/",
];
/// A word with a slash and one of these ends is a path.
const ENDS: &[&str] = &[
    ".rs", ".md", ".py", ".toml", ".txt", ".proto", ".js", ".css", ".yaml", ".yml", ".png", ".tpl",
];
/// A word without a slash is a file's name when it has one of these ends. (`answer.json` is a call, `keda.sh` a host.)
const ENDS_OF_NAMES: &[&str] = &[".rs", ".md", ".py"];
/// Pages of other projects that comments name.
const OTHER_PROJECTS: &[&str] = &["gguf.md", "vllm/benchmarks/serve.py"];

/// Every path of the repository, and every end of one: `src/main.rs` of `coordinator/src/main.rs`.
#[derive(Debug, Default)]
pub struct Paths(BTreeSet<String>);

impl Paths {
    pub fn of_repository(root: &Path) -> Self {
        let files: Vec<String> = all_files(root).iter().map(|path| relative(root, path)).collect();
        Self::of(files.iter().map(String::as_str))
    }

    pub fn of<'a>(files: impl IntoIterator<Item = &'a str>) -> Self {
        let mut known = BTreeSet::new();
        for file in files {
            let folders = file.match_indices('/').map(|(at, _)| &file[..at]);
            for path in folders.chain([file]) {
                let inner = path.match_indices('/').map(|(at, _)| &path[at + 1..]);
                known.extend(inner.chain([path]).map(str::to_owned));
            }
        }
        Self(known)
    }

    fn has(&self, path: &str) -> bool {
        self.0.contains(path.trim_end_matches('/'))
    }
}

pub fn page_length(path: &str, text: &str, lines_max: usize) -> Vec<Violation> {
    let count = text.lines().count();
    let violation = || format!("{path}: {count} lines, at most {lines_max}");
    (count > lines_max).then(violation).into_iter().collect()
}

/// Functions that a page names in parentheses behind a file, as in "FILE (`push`: each block)", and that the file lacks.
pub fn named_functions(path: &str, page: &str, text_of: impl Fn(&str) -> String) -> Vec<Violation> {
    let is_function = |name: &str| !name.is_empty() && name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_');
    let mut found = Vec::new();
    for (at, line) in page.lines().enumerate() {
        let pieces: Vec<&str> = line.split('`').collect();
        let mut file = None;
        // Prose and code take turns.
        for pair in pieces.windows(2).skip(1).step_by(2) {
            let (code, prose) = (pair[0], pair[1]);
            let name = code.rsplit("::").next().unwrap_or_default();
            if let Some(file) = file.filter(|_| is_function(name)) {
                let text = text_of(file);
                if !["(", "<"].iter().any(|end| text.contains(&format!("fn {name}{end}"))) {
                    found.push(format!("{path}:{}: {file} has no function {name}", at + 1));
                }
            }
            if code.ends_with(".rs") && prose.starts_with(" (") {
                file = Some(code);
            }
            if prose.contains(')') {
                file = None;
            }
        }
    }
    found
}

/// The paths that the prose of a file cites and that do not exist. Prose is the whole of a page and the comments of all
/// other files.
pub fn cited_paths(path: &str, text: &str, known: &Paths) -> Vec<Violation> {
    let mut found = Vec::new();
    for (line, prose) in prose(path, text) {
        let words = prose.split(|c: char| !(c.is_ascii_alphanumeric() || "_./-".contains(c)));
        let cited = words
            .map(|word| word.trim_end_matches('.'))
            .filter(|word| is_path(word));
        let missing = cited.filter(|cited| !known.has(up_removed(cited)));
        found.extend(missing.map(|cited| format!("{path}:{line}: there is no {cited}")));
    }
    if path.ends_with(".md") {
        found.extend(broken_links(path, text, known));
    }
    found
}

fn is_path(word: &str) -> bool {
    let path = up_removed(word);
    // The start of several names (`scripts/get-*`), and words that begin as no path does.
    if path.ends_with('-')
        || path.starts_with(['/', '-', '_', '.'])
        || path.starts_with("target/")
        || OTHER_PROJECTS.contains(&path)
    {
        return false;
    }
    let ends_as = |ends: &[&str]| ends.iter().any(|end| path.ends_with(end));
    match path.contains('/') {
        true => ends_as(ENDS) || FOLDERS.iter().any(|folder| path.starts_with(folder)),
        false => ends_as(ENDS_OF_NAMES),
    }
}

fn up_removed(mut path: &str) -> &str {
    while let Some(rest) = path.strip_prefix("../").or_else(|| path.strip_prefix("./")) {
        path = rest;
    }
    path
}

/// Links of a page to files, each relative to the page's own folder.
fn broken_links(path: &str, text: &str, known: &Paths) -> Vec<Violation> {
    let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
    let mut found = Vec::new();
    for (at, _) in text.match_indices("](") {
        let target = text[at + 2..].split([')', '#', ' ']).next().unwrap_or_default();
        if target.is_empty() || target.contains("://") {
            continue;
        }
        let mut parts: Vec<&str> = folder.split('/').filter(|part| !part.is_empty()).collect();
        let mut is_inside = true;
        for part in target.split('/').filter(|part| !part.is_empty() && *part != ".") {
            match part {
                ".." => is_inside &= parts.pop().is_some(),
                _ => parts.push(part),
            }
        }
        if !is_inside || !known.has(&parts.join("/")) {
            let line = text[..at].matches('\n').count() + 1;
            found.push(format!("{path}:{line}: the link to {target} leads nowhere"));
        }
    }
    found
}

/// Lines (from 1) of a file that are written for people.
fn prose<'a>(path: &str, text: &'a str) -> Vec<(usize, &'a str)> {
    let name = path.rsplit('/').next().unwrap_or(path);
    let end = name.rsplit_once('.').map_or("", |(_, end)| end);
    let mut is_in_text = false;
    let mut take = |line: &'a str| -> Option<&'a str> {
        let start = line.trim_start();
        match end {
            "md" => Some(line),
            "rs" | "proto" | "js" | "css" => match start.starts_with("//") || start.starts_with("/*") {
                true => Some(start),
                false => line.split_once(" // ").map(|(_, comment)| comment),
            },
            "py" => {
                let was_in_text = is_in_text;
                is_in_text ^= line.matches("\"\"\"").count() % 2 == 1;
                let is_text = was_in_text || start.starts_with("\"\"\"") || start.starts_with('#');
                is_text.then_some(start)
            }
            "toml" | "yaml" | "yml" | "env" | "service" | "" => start.starts_with('#').then_some(start),
            _ => None,
        }
    };
    let lines = text.lines().enumerate();
    lines.filter_map(|(at, line)| Some((at + 1, take(line)?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_is_too_long_is_found() {
        assert_eq!(page_length("README.md", &"x\n".repeat(90), 90).len(), 0);
        assert_eq!(page_length("README.md", &"x\n".repeat(91), 90).len(), 1);
    }

    #[test]
    fn a_named_function_that_does_not_exist_is_found() {
        let text_of = |_: &str| "fn push(&self) {}\nfn take<T>() {}\n".to_owned();
        let named = |page: &str| named_functions("A.md", page, text_of).len();
        assert_eq!(
            named("| `a.rs` (`push`: each, `Queue::take` later), `gone` (`gone`) |\n"),
            0
        );
        assert_eq!(
            named("`a.rs` (what `Opened` and `From<Rejected>` make), `a.rs` (all) `gone`\n"),
            0
        );
        assert_eq!(
            named("`b.rs`, `a.rs` (`push`; `gone`), then `a.rs` (`Queue::lost`)\n"),
            2
        );
    }

    fn cited(path: &str, text: &str) -> usize {
        let files = ["crates/a/src/b.rs", "docs/reference/c.md", "scripts/d", "proto/e.proto"];
        cited_paths(path, text, &Paths::of(files)).len()
    }

    #[test]
    fn a_cited_path_that_does_not_exist_is_found() {
        let good =
            "//! `crates/a/src/b.rs`, `a/src/b.rs`, b.rs, docs/reference/c.md. scripts/d, crates/a/ and /etc/x.toml\n";
        assert_eq!(cited("crates/a/src/b.rs", good), 0);
        // A comment behind code: made here, so that this line has none.
        let bad =
            "// crates/a/src/x.rs, x/b.rs; C.md\nfn f() {} SLASHES scripts/x, docs/c.md\nlet s = \"docs/x.md\";\n";
        assert_eq!(cited("crates/a/src/b.rs", &bad.replace("SLASHES", "//")), 5);
        assert_eq!(
            cited(
                "a.py",
                "\"\"\"See docs/x.md,\nscripts/y.\n\"\"\"\n# docs/z.md\nopen('docs/q.md')\n"
            ),
            3
        );
        assert_eq!(cited("scripts/d", "# as in scripts/e\nscripts/f\n"), 1);
        assert_eq!(
            cited(
                "crates/a/src/b.rs",
                "// https://h/docs/x.md, gguf.md, target/x.md, prefill/decode\n"
            ),
            0
        );
    }

    #[test]
    fn a_link_that_leads_nowhere_is_found() {
        let good =
            "[c](c.md#part) [b](../../crates/a/src/b.rs) [here](#x) [web](https://h/x.md) [folder](../../scripts/)\n";
        assert_eq!(cited("docs/reference/c.md", good), 0);
        assert_eq!(cited("docs/reference/c.md", "[x](x) [up](../c) [out](../../../d)\n"), 3);
    }
}
