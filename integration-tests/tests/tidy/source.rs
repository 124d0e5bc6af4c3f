//! Rust source as the rules see it: comments and literals blanked, test code told from product code.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// One `.rs` file of the workspace.
#[derive(Debug)]
pub struct SourceFile {
    /// Relative to the workspace root, with `/`.
    pub path: String,
    pub text: String,
    /// `text` with comments and literals blanked; same lines, same columns (in bytes).
    pub code: String,
    /// `code` without what only tests compile. Empty for a file that is test code as a whole.
    pub product: String,
}

/// A function with a body: where it starts (line, from 1) and how many lines it has.
#[derive(Debug, PartialEq, Eq)]
pub struct Function {
    pub name: String,
    pub line: usize,
    pub line_count: usize,
}

pub fn workspace_root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent()
        .expect("integration-tests lies in the workspace")
        .to_owned()
}

impl SourceFile {
    pub fn new(path: &str, text: &str) -> Self {
        let code = blank_comments_and_literals(text);
        let product = if is_test_file(path) {
            String::new()
        } else {
            blank_test_items(&code)
        };
        Self {
            path: path.to_owned(),
            text: text.to_owned(),
            code,
            product,
        }
    }

    pub fn is_test_file(&self) -> bool {
        is_test_file(&self.path)
    }

    /// What only tests compile: the whole of a test file, else the `#[cfg(test)]` items.
    pub fn test_code(&self) -> String {
        if self.is_test_file() {
            return self.code.clone();
        }
        let pairs = self.code.bytes().zip(self.product.bytes());
        let bytes = pairs.map(|(code, product)| if code == product && code != b'\n' { b' ' } else { code });
        String::from_utf8_lossy(&bytes.collect::<Vec<_>>()).into_owned()
    }

    /// Lines that count towards the size budget: all but the `#[cfg(test)]` items.
    pub fn product_line_count(&self) -> usize {
        let lines_in = |range: &Range<usize>| self.code[range.clone()].matches('\n').count() + 1;
        self.text.lines().count() - test_items(&self.code).iter().map(lines_in).sum::<usize>()
    }

    pub fn crate_dir(&self) -> &str {
        let parts = if self.path.starts_with("crates/") { 2 } else { 1 };
        let end = self
            .path
            .match_indices('/')
            .nth(parts - 1)
            .map_or(self.path.len(), |(at, _)| at);
        &self.path[..end]
    }
}

/// All `.rs` files of the workspace, sorted by path. Generated and hidden folders are left out.
pub fn rust_files() -> Vec<SourceFile> {
    let root = workspace_root();
    let mut files = files_with(&root, &["rs"]);
    files.retain(|path| !path.components().any(|part| part.as_os_str() == "generated"));
    let read = |path: &PathBuf| fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let files = files.iter().map(|path| (relative(&root, path), path));
    let files = files.filter(|(name, _)| !name.contains("/generated/"));
    files.map(|(name, path)| SourceFile::new(&name, &read(path))).collect()
}

pub fn relative(root: &Path, path: &Path) -> String {
    let path = path.strip_prefix(root).unwrap_or(path);
    path.to_string_lossy().replace('\\', "/")
}

/// Files below `root` with one of the extensions, sorted.
pub fn files_with(root: &Path, extensions: &[&str]) -> Vec<PathBuf> {
    let mut files = all_files(root);
    files.retain(|path| {
        let extension = path.extension();
        extension.is_some_and(|e| extensions.iter().any(|wanted| e == *wanted))
    });
    files
}

/// Files below `root`, sorted. `target`, hidden folders and virtual environments are skipped.
pub fn all_files(root: &Path) -> Vec<PathBuf> {
    let (mut found, mut folders) = (Vec::new(), vec![root.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
            let path = entry.expect("a folder entry").path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if path.is_dir() {
                if !name.starts_with('.') && name != "target" && name != "node_modules" {
                    folders.push(path);
                }
            } else {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

fn is_test_file(path: &str) -> bool {
    path.starts_with("integration-tests/")
        || path.contains("/tests/")
        || path.contains("/benches/")
        || path.contains("/examples/")
        || path.ends_with("_tests.rs")
        || path.ends_with("/tests.rs")
        // The suite every KV transport passes: compiled for tests only.
        || path.ends_with("/conformance.rs")
        || path.contains("/conformance/")
}

/// Replaces comments and the insides of string and character literals by spaces, byte for byte; newlines stay.
pub fn blank_comments_and_literals(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let end = match bytes[at] {
            b'/' if bytes[at..].starts_with(b"//") => line_end(bytes, at),
            b'/' if bytes[at..].starts_with(b"/*") => block_comment_end(bytes, at),
            b'"' => string_end(bytes, at),
            b'r' if !is_word(bytes, at.wrapping_sub(1)) || bytes.get(at.wrapping_sub(1)) == Some(&b'b') => {
                raw_string_end(bytes, at).unwrap_or(at)
            }
            b'\'' => char_end(bytes, at).unwrap_or(at),
            _ => at,
        };
        for byte in &mut out[at..end] {
            if *byte != b'\n' {
                *byte = b' ';
            }
        }
        at = end.max(at + 1);
    }
    String::from_utf8_lossy(&out).into_owned()
}

fn is_word(bytes: &[u8], at: usize) -> bool {
    bytes.get(at).is_some_and(|b| b.is_ascii_alphanumeric() || *b == b'_')
}

fn line_end(bytes: &[u8], at: usize) -> usize {
    bytes[at..]
        .iter()
        .position(|b| *b == b'\n')
        .map_or(bytes.len(), |n| at + n)
}

fn block_comment_end(bytes: &[u8], mut at: usize) -> usize {
    let mut depth = 0;
    while at < bytes.len() {
        if bytes[at..].starts_with(b"/*") {
            (depth, at) = (depth + 1, at + 2);
        } else if bytes[at..].starts_with(b"*/") {
            (depth, at) = (depth - 1, at + 2);
            if depth == 0 {
                break;
            }
        } else {
            at += 1;
        }
    }
    at
}

fn string_end(bytes: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    while at < bytes.len() && bytes[at] != b'"' {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(bytes.len())
}

fn raw_string_end(bytes: &[u8], start: usize) -> Option<usize> {
    let hashes = bytes[start + 1..].iter().take_while(|b| **b == b'#').count();
    let open = start + 1 + hashes;
    if bytes.get(open) != Some(&b'"') {
        return None;
    }
    let close: Vec<u8> = std::iter::once(b'"').chain(std::iter::repeat_n(b'#', hashes)).collect();
    let length = bytes[open + 1..]
        .windows(close.len())
        .position(|window| window == close)?;
    Some(open + 1 + length + close.len())
}

/// `None` for a lifetime.
fn char_end(bytes: &[u8], start: usize) -> Option<usize> {
    let end = match bytes.get(start + 1)? {
        b'\\' => start + 3 + bytes[start + 3..].iter().position(|b| *b == b'\'')?,
        _ => start + 2 + bytes[start + 2..].iter().take(4).position(|b| *b == b'\'')?,
    };
    let is_one_char =
        bytes[start + 1] == b'\\' || std::str::from_utf8(&bytes[start + 1..end]).ok()?.chars().count() == 1;
    is_one_char.then_some(end + 1)
}

/// Byte ranges of the items behind `#[cfg(test)]`, none inside another.
fn test_items(code: &str) -> Vec<Range<usize>> {
    let mut found: Vec<Range<usize>> = Vec::new();
    for (start, attribute) in code.match_indices("#[cfg(test)]") {
        if found.last().is_none_or(|last| last.end <= start) {
            found.push(start..item_end(code.as_bytes(), start + attribute.len()));
        }
    }
    found
}

fn blank_test_items(code: &str) -> String {
    let mut out = code.as_bytes().to_vec();
    for range in test_items(code) {
        for byte in &mut out[range] {
            if *byte != b'\n' {
                *byte = b' ';
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// The end of the item that starts at `at`: behind its `;` or behind the brace that closes its first one.
fn item_end(bytes: &[u8], at: usize) -> usize {
    let (mut braces, mut brackets) = (0_i32, 0_i32);
    for (offset, byte) in bytes[at..].iter().enumerate() {
        match byte {
            b'(' | b'[' => brackets += 1,
            b')' | b']' => brackets -= 1,
            b'{' => braces += 1,
            b'}' => {
                braces -= 1;
                if braces == 0 {
                    return at + offset + 1;
                }
            }
            b';' if braces == 0 && brackets == 0 => return at + offset + 1,
            _ => {}
        }
    }
    bytes.len()
}

/// Every function with a body in blanked code.
pub fn functions(code: &str) -> Vec<Function> {
    let bytes = code.as_bytes();
    let mut found = Vec::new();
    for (start, _) in code.match_indices("fn ") {
        let name: String = code[start + 3..]
            .chars()
            .take_while(|c| c.is_alphanumeric() || *c == '_')
            .collect();
        if is_word(bytes, start.wrapping_sub(1)) || name.is_empty() {
            continue;
        }
        let end = item_end(bytes, start);
        if bytes[end - 1] != b'}' {
            continue;
        }
        let line = code[..start].matches('\n').count() + 1;
        let line_count = code[start..end].matches('\n').count() + 1;
        found.push(Function { name, line, line_count });
    }
    found
}

/// Positions (line from 1) of `needle` in blanked code where it does not continue a longer word.
pub fn occurrences(code: &str, needle: &str) -> Vec<usize> {
    let bytes = code.as_bytes();
    let starts_word = needle.starts_with(|c: char| c.is_alphanumeric() || c == '_');
    let ends_word = needle.ends_with(|c: char| c.is_alphanumeric() || c == '_');
    code.match_indices(needle)
        .filter(|(at, _)| !(starts_word && is_word(bytes, at.wrapping_sub(1))))
        .filter(|(at, _)| !(ends_word && is_word(bytes, at + needle.len())))
        .map(|(at, _)| code[..at].matches('\n').count() + 1)
        .collect()
}
