//! The rules about single files: headers, sizes, banned calls, unsafe code, wire types.

use std::collections::BTreeSet;

use crate::source::{SourceFile, functions, occurrences};

/// One broken rule, printed as `path:line: what`.
pub type Violation = String;

/// Of a crate's `lib.rs` or `main.rs`, which a newcomer reads first.
const CRATE_HEADER_LINES_MAX: usize = 12;
/// Of any other file: one sentence, and a page at most where the file holds a definition (numerics, a wire layout).
const FILE_HEADER_LINES_MAX: usize = 40;
const FILE_LINES_MAX: usize = 500;
const FUNCTION_LINES_MAX: usize = 70;

/// A line may be let off one ban by a comment on it or on the line above: `tidy: allow(NAME) because ...`. What clippy
/// bans too is let off by clippy's own attribute, which carries its reason, within the five lines above.
fn is_allowed(file: &SourceFile, line: usize, name: &str) -> bool {
    let lines: Vec<&str> = file.text.lines().collect();
    let above = |count: usize| &lines[line.saturating_sub(count + 1)..line];
    let mark = format!("tidy: allow({name}) ");
    let attribute = above(5).join(" ");
    above(1).iter().any(|text| text.contains(&mark))
        || attribute.contains("clippy::disallowed_methods") && attribute.contains("reason =")
}

pub fn header(file: &SourceFile) -> Vec<Violation> {
    let lines: Vec<&str> = file.text.lines().take_while(|line| line.starts_with("//!")).collect();
    if lines.first().is_none_or(|first| first.len() < "//! Owns.".len()) {
        return vec![format!(
            "{}:1: starts without a `//!` sentence that says what the file owns",
            file.path
        )];
    }
    let is_crate_header = file.path.ends_with("/lib.rs") || file.path.ends_with("/main.rs");
    let lines_max = if is_crate_header {
        CRATE_HEADER_LINES_MAX
    } else {
        FILE_HEADER_LINES_MAX
    };
    if lines.len() > lines_max {
        return vec![format!(
            "{}:1: header of {} lines, at most {lines_max}",
            file.path,
            lines.len()
        )];
    }
    let has_sentence = lines.iter().any(|line| line.trim_end().ends_with(['.', ':', '`']));
    if !has_sentence {
        return vec![format!("{}:1: the header is not a sentence", file.path)];
    }
    Vec::new()
}

pub fn file_size(file: &SourceFile) -> Vec<Violation> {
    let count = file.product_line_count();
    if file.is_test_file() || count <= FILE_LINES_MAX {
        return Vec::new();
    }
    vec![format!(
        "{}:1: {count} lines without its tests, at most {FILE_LINES_MAX}",
        file.path
    )]
}

pub fn function_size(file: &SourceFile) -> Vec<Violation> {
    functions(&file.product)
        .iter()
        .filter(|function| function.line_count > FUNCTION_LINES_MAX)
        .map(|function| {
            let (line, name, count) = (function.line, &function.name, function.line_count);
            format!(
                "{}:{line}: fn {name} has {count} lines, at most {FUNCTION_LINES_MAX}",
                file.path
            )
        })
        .collect()
}

/// Where a ban holds.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scope {
    Everywhere,
    Product,
    Tests,
    ServingCore,
}

struct Ban {
    name: &'static str,
    needles: &'static [&'static str],
    scope: Scope,
    reason: &'static str,
}

const BANS: &[Ban] = &[
    Ban {
        name: "unbounded",
        needles: &[
            "unbounded_channel",
            "UnboundedSender",
            "UnboundedReceiver",
            "unbounded(",
        ],
        scope: Scope::Everywhere,
        reason: "every queue has a limit: use a bounded channel",
    },
    Ban {
        name: "process-exit",
        needles: &["process::exit", "process::abort"],
        scope: Scope::Everywhere,
        reason: "skips drains and leaves child processes: return an exit code from main",
    },
    Ban {
        name: "unfinished",
        needles: &["todo!", "unimplemented!", "dbg!"],
        scope: Scope::Everywhere,
        reason: "not finished",
    },
    Ban {
        name: "unwrap",
        needles: &[".unwrap()"],
        scope: Scope::Product,
        reason: "say why it cannot fail (`expect`), or return the error",
    },
    Ban {
        name: "sleep",
        needles: &["thread::sleep"],
        scope: Scope::Tests,
        reason: "hides a race: wait for the condition with a deadline",
    },
    Ban {
        name: "clock",
        needles: &["SystemTime", "Instant::now", "UNIX_EPOCH"],
        scope: Scope::ServingCore,
        reason: "the core gets time as an argument",
    },
    Ban {
        name: "unordered",
        needles: &["HashMap", "HashSet", "RandomState"],
        scope: Scope::ServingCore,
        reason: "decisions use ordered maps only: same seed, same history",
    },
    Ban {
        name: "core-effects",
        needles: &[
            "println!",
            "eprintln!",
            "tokio",
            "tracing",
            "rand",
            "std::fs",
            "std::net",
            "std::thread",
            "std::env",
            "async",
        ],
        scope: Scope::ServingCore,
        reason: "the core does no IO, no async, no randomness of its own and no logging",
    },
];

pub fn banned_calls(file: &SourceFile) -> Vec<Violation> {
    let in_core = file.path.starts_with("crates/serving-core/src/");
    let mut found = Vec::new();
    for ban in BANS {
        let code = match ban.scope {
            Scope::Everywhere => file.code.clone(),
            Scope::Product => file.product.clone(),
            Scope::Tests => file.test_code(),
            Scope::ServingCore if in_core => file.product.clone(),
            Scope::ServingCore => continue,
        };
        for needle in ban.needles {
            for line in occurrences(&code, needle) {
                if !is_allowed(file, line, ban.name) {
                    found.push(format!(
                        "{}:{line}: `{needle}` ({}): {}",
                        file.path, ban.name, ban.reason
                    ));
                }
            }
        }
    }
    found
}

/// Unsafe code: only where the design allows it, and each block, impl or function says why it is sound.
pub fn unsafe_code(file: &SourceFile) -> Vec<Violation> {
    const ALLOWED: &[&str] = &[
        "crates/cuda/",
        "crates/cuda-testkit/",
        "crates/engine/",
        "crates/kv-transfer/",
        "crates/model-files/src/mapped_file.rs",
        "crates/service-runtime/src/freed_memory.rs",
    ];
    let mut found = Vec::new();
    for line in occurrences(&file.code, "unsafe") {
        if !ALLOWED.iter().any(|allowed| file.path.starts_with(allowed)) {
            found.push(format!("{}:{line}: unsafe code outside {ALLOWED:?}", file.path));
        } else if !is_explained(file, line) {
            found.push(format!(
                "{}:{line}: `unsafe` without a `SAFETY:` comment (`# Safety` on a function)",
                file.path
            ));
        }
    }
    found
}

/// A library, program, test, example or build script without unsafe code says that it never will have any.
pub fn forbidden_unsafe(files: &[SourceFile]) -> Vec<Violation> {
    let has_unsafe = |file: &&SourceFile| !occurrences(&file.code, "unsafe").is_empty();
    let unsafe_paths: Vec<&str> = files.iter().filter(has_unsafe).map(|file| file.path.as_str()).collect();
    let roots = files.iter().filter_map(|file| Some((file, modules_of(&file.path)?)));
    roots
        .filter(|(_, modules)| !unsafe_paths.iter().any(|path| path.starts_with(modules)))
        .filter(|(file, _)| !file.code.contains("#![forbid(unsafe_code)]"))
        .map(|(file, _)| {
            format!(
                "{}:1: a crate without unsafe code says `#![forbid(unsafe_code)]`",
                file.path
            )
        })
        .collect()
}

/// How the paths of a crate's files start, if `path` is the crate's root as cargo finds it.
fn modules_of(path: &str) -> Option<&str> {
    let (folder, name) = path.rsplit_once('/')?;
    let parts: Vec<&str> = folder.rsplit('/').collect();
    if parts.iter().skip(1).any(|part| *part == "src") {
        return None;
    }
    let is_of_tests = |part: Option<&&str>| part.is_some_and(|part| ["tests", "examples", "benches"].contains(part));
    match name {
        "lib.rs" if parts[0] == "src" => Some(folder),
        "main.rs" if is_of_tests(parts.get(1)) => Some(folder),
        "main.rs" if parts[0] == "src" => Some(path),
        "build.rs" => Some(path),
        _ if is_of_tests(parts.first()) => Some(path),
        _ => None,
    }
}

/// Looks at the line itself and upwards over the comments, attributes and unfinished statements in front of it.
fn is_explained(file: &SourceFile, line: usize) -> bool {
    const LOOK_BACK_LINES: usize = 12;
    let lines: Vec<&str> = file.text.lines().collect();
    let code: Vec<&str> = file.code.lines().collect();
    // `unsafe fn` in a type (`f: unsafe fn(..)`) runs nothing.
    if code[line - 1].contains("unsafe fn(") || code[line - 1].contains("unsafe extern") {
        return true;
    }
    // A private unsafe function may say it inside, where it does what needs it.
    let look_ahead = if code[line - 1].contains("unsafe fn") { 4 } else { 0 };
    if is_explained_for_its_impl(&lines, line) {
        return true;
    }
    let near = line.saturating_sub(LOOK_BACK_LINES)..(line + look_ahead).min(lines.len());
    near.into_iter()
        .any(|at| lines[at].contains("SAFETY:") || lines[at].contains("# Safety"))
}

/// An `impl` of dozens of one-line intrinsics gives its reason once, where it waives clippy's lint.
fn is_explained_for_its_impl(lines: &[&str], line: usize) -> bool {
    const WAIVER_LINES: usize = 8;
    let head = (0..line).rev().find(|at| lines[*at].trim_start().starts_with("impl "));
    head.is_some_and(|head| {
        let waiver = &lines[head.saturating_sub(WAIVER_LINES)..head];
        waiver.iter().any(|l| l.contains("undocumented_unsafe_blocks"))
    })
}

/// Generated wire types in a public signature outside `proto`: conversion happens once, at the edge.
pub fn wire_types(file: &SourceFile) -> Vec<Violation> {
    if file.path.starts_with("proto/") || file.is_test_file() {
        return Vec::new();
    }
    let imported = names_imported_from(&file.product, "proto::v1");
    let mut found = Vec::new();
    for (at, _) in file.product.match_indices("pub ") {
        let rest = &file.product[at..];
        let end = rest.find(['{', ';', '=']).unwrap_or(rest.len());
        let field_end = rest.find(",\n").unwrap_or(rest.len());
        let is_function = rest[..end].contains("fn ");
        let signature = if is_function {
            &rest[..end]
        } else {
            &rest[..end.min(field_end)]
        };
        let names_wire = signature.contains("v1::") || imported.iter().any(|n| !occurrences(signature, n).is_empty());
        let line = file.product[..at].matches('\n').count() + 1;
        if names_wire && !is_allowed(file, line, "wire-type") {
            let signature: String = signature.split_whitespace().collect::<Vec<_>>().join(" ");
            found.push(format!(
                "{}:{line}: a generated wire type in a public signature: {signature}",
                file.path
            ));
        }
    }
    found
}

/// Names that `use PREFIX::...;` statements bring in, groups and renames included; modules (lower case) are left out,
/// their items are seen by their `v1::` path or by the module's own name.
fn names_imported_from(code: &str, prefix: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for (at, _) in code.match_indices(&format!("use {prefix}")) {
        let statement = &code[at + "use ".len()..];
        let statement = &statement[..statement.find(';').unwrap_or(statement.len())];
        for part in statement.trim_start_matches(prefix).split([',', '{', '}']) {
            let last = part.rsplit(" as ").next().unwrap_or(part).trim();
            let name = last.rsplit("::").next().unwrap_or(last).trim();
            if name.starts_with(|c: char| c.is_ascii_uppercase()) {
                names.insert(name.to_owned());
            }
        }
    }
    names
}

/// A closed list of labels (`ALL`, `NAMES`) beside the `name` that it lists: a label that the list lacks has no series at
/// the start, and no compiler finds it.
pub fn closed_labels(file: &SourceFile) -> Vec<Violation> {
    let mut found = Vec::new();
    for (at, _) in file.text.match_indices("\nimpl ") {
        let block = &file.text[at..];
        let block = &block[..block.find("\n}\n").unwrap_or(block.len())];
        let part = |from: &str, to: &str| {
            let part = &block[block.find(from)?..];
            Some(&part[..part.find(to).unwrap_or(part.len())])
        };
        let Some(name) = part("fn name(", "\n    }") else {
            continue;
        };
        let labels: Vec<&str> = name.split('"').skip(1).step_by(2).collect();
        let line = file.text[..at].matches('\n').count() + 2;
        if let Some(names) = part("const NAMES", "];") {
            let lacks = |label: &&&str| !names.contains(&format!("\"{label}\""));
            found.extend(labels.iter().filter(lacks).map(|label| {
                let path = &file.path;
                format!("{path}:{line}: `NAMES` lacks \"{label}\" of `name`")
            }));
        }
        let count = part("const ALL: [", "]").and_then(|all| all.rsplit_once("; ")?.1.parse::<usize>().ok());
        if let Some(count) = count.filter(|count| !labels.is_empty() && *count != labels.len()) {
            let (path, names) = (&file.path, labels.len());
            found.push(format!("{path}:{line}: `ALL` has {count} values, `name` has {names}"));
        }
    }
    found
}

/// No test (and no script) reads outside the repository.
pub fn reads_outside(path: &str, text: &str) -> Vec<Violation> {
    // Split so that this file does not name them itself.
    let banned = [
        concat!("../", "shared"),
        concat!("/work/", "shared"),
        concat!("/work/", "main"),
        concat!("/tmp/", "m/"),
    ];
    let hits = |line: &str| banned.iter().any(|needle| line.contains(needle));
    text.lines()
        .enumerate()
        .filter(|(_, line)| hits(line))
        .map(|(at, line)| format!("{path}:{}: reads outside the repository: {}", at + 1, line.trim()))
        .collect()
}
