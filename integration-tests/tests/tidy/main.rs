//! The house rules (STYLE.md) as tests: layering, headers, sizes, banned calls, unsafe code, wire types, file names, and
//! the paths that pages and comments cite.

#![forbid(unsafe_code)]

mod dependencies;
mod imports;
mod layering;
mod pages;
mod public_items;
mod rules;
mod source;

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use layering::Manifest;
use pages::Paths;
use rules::Violation;
use source::{SourceFile, all_files, files_with, functions, relative, rust_files, workspace_root};

#[track_caller]
fn assert_none(rule: &str, violations: &[Violation]) {
    assert!(
        violations.is_empty(),
        "{rule}: {} broken\n  {}",
        violations.len(),
        violations.join("\n  ")
    );
}

fn check_files(rule: &str, check: fn(&SourceFile) -> Vec<Violation>) {
    let files = rust_files();
    assert!(files.len() > 20, "only {} files seen: the walk is broken", files.len());
    assert_none(rule, &files.iter().flat_map(check).collect::<Vec<_>>());
}

#[test]
fn crates_import_lower_levels_only() {
    let manifests = Manifest::read_members(&workspace_root());
    assert!(manifests.iter().any(|manifest| manifest.name == "serving-core"));
    assert_none("layering", &layering::violations(&manifests));
}

#[test]
fn no_new_import_cycles() {
    let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let allowed = imports::ALLOWED.iter();
    let allowed = allowed.map(|(dir, folder, names)| ((*dir).to_owned(), (*folder).to_owned(), owned(names)));
    let (allowed, found): (BTreeSet<_>, _) = (allowed.collect(), imports::cycles(&rust_files()));
    let words = |cycle: &imports::Cycle| format!("{}/src/{}: {}", cycle.0, cycle.1, cycle.2.join(", "));
    assert_none(
        "import cycles",
        &found.difference(&allowed).map(words).collect::<Vec<_>>(),
    );
    assert_none(
        "cycles that are gone: strike them",
        &allowed.difference(&found).map(words).collect::<Vec<_>>(),
    );
}

#[test]
fn what_is_public_is_used_by_others() {
    assert_none("public items", &public_items::violations(&rust_files()));
}

#[test]
fn every_file_says_what_it_owns() {
    check_files("headers", rules::header);
}

#[test]
fn files_keep_their_size() {
    check_files("file size", rules::file_size);
}

#[test]
fn the_median_file_is_small() {
    const MEDIAN_LINES_MAX: usize = 200;
    let files = rust_files();
    let mut sizes: Vec<usize> = files
        .iter()
        .filter(|file| !file.is_test_file())
        .map(SourceFile::product_line_count)
        .collect();
    sizes.sort_unstable();
    let median = sizes[sizes.len() / 2];
    assert!(
        median <= MEDIAN_LINES_MAX,
        "median file of {median} lines, at most {MEDIAN_LINES_MAX}"
    );
}

#[test]
fn functions_keep_their_size() {
    check_files("function size", rules::function_size);
}

#[test]
fn banned_calls_are_not_made() {
    check_files("banned calls", rules::banned_calls);
}

#[test]
fn unsafe_code_is_confined_and_explained() {
    check_files("unsafe code", rules::unsafe_code);
}

#[test]
fn crates_without_unsafe_code_forbid_it() {
    assert_none("forbidden unsafe code", &rules::forbidden_unsafe(&rust_files()));
}

#[test]
fn dependencies_are_those_that_deny_toml_allows() {
    let (rules, packages) = (dependencies::Rules::read(&workspace_root()), dependencies::packages());
    assert!(packages.len() > 100, "only {} packages seen", packages.len());
    assert_none("dependencies", &rules.violations(&packages));
}

#[test]
fn protoc_answers_only_with_the_descriptors_of_its_checksum() {
    let (tools, folder) = (workspace_root().join("tools"), tempfile::tempdir().expect("a folder"));
    let (copy, protos) = (folder.path().join("tools"), folder.path().join("etcd-client-0.21.1"));
    fs::create_dir_all(&copy).expect("a folder");
    fs::create_dir_all(&protos).expect("a folder");
    let descriptors = "etcd-client-0.21.binpb";
    for name in ["protoc", descriptors] {
        fs::copy(tools.join(name), copy.join(name)).expect("a file of tools/");
    }
    let ask = || {
        let out = folder.path().join("out");
        let mut protoc = Command::new(copy.join("protoc"));
        protoc
            .current_dir(&protos)
            .arg("-o")
            .arg(&out)
            .arg("proto/etcd/rpc.proto");
        let is_answered = protoc.output().expect("tools/protoc runs").status.success();
        is_answered.then(|| fs::read(out).expect("an answer"))
    };
    let mut bytes = fs::read(tools.join(descriptors)).expect("the descriptors");
    assert_eq!(ask().as_ref(), Some(&bytes));
    bytes[1000] ^= 1;
    fs::write(copy.join(descriptors), bytes).expect("the copy takes a byte");
    assert_eq!(ask(), None);
}

#[test]
fn wire_types_stay_inside_proto() {
    check_files("wire types", rules::wire_types);
}

#[test]
fn lists_of_labels_are_whole() {
    let has_list = |file: &&SourceFile| file.text.contains("const NAMES: [") || file.text.contains("const ALL: [");
    let lists = rust_files().iter().filter(has_list).count();
    assert!(lists > 8, "only {lists} files with lists: the search is broken");
    check_files("closed labels", rules::closed_labels);
}

#[test]
fn a_role_is_its_configuration_and_its_service() {
    let files = rust_files();
    let of = |dir: &str| -> BTreeSet<String> {
        let prefix = format!("{dir}/src/");
        let paths = files.iter().filter_map(|file| file.path.strip_prefix(&prefix));
        paths
            .filter(|path| !path.ends_with("_tests.rs") && !path.ends_with("tests.rs"))
            .map(str::to_owned)
            .collect()
    };
    // What a node does is `crates/node`, for both roles.
    let files = ["config.rs", "lib.rs", "main.rs", "service.rs"].map(str::to_owned);
    for role in ["prefill-node", "decode-node"] {
        assert_eq!(of(role), BTreeSet::from(files.clone()), "{role}/src");
    }
}

#[test]
fn nothing_reads_outside_the_repository() {
    let root = workspace_root();
    let mut violations = Vec::new();
    for path in files_with(&root, &["rs", "py", "sh", "toml"]) {
        let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        violations.extend(rules::reads_outside(&relative(&root, &path), &text));
    }
    assert_none("outside", &violations);
}

#[test]
fn pages_keep_their_length() {
    let root = workspace_root();
    let violations = pages::PAGE_LINES_MAX.iter().flat_map(|(page, lines_max)| {
        let text = fs::read_to_string(root.join(page)).unwrap_or_else(|error| panic!("{page}: {error}"));
        pages::page_length(page, &text, *lines_max)
    });
    assert_none("length of pages", &violations.collect::<Vec<_>>());
}

#[test]
fn cited_paths_exist() {
    let root = workspace_root();
    let known = Paths::of_repository(&root);
    let mut violations = Vec::new();
    for path in all_files(&root) {
        // Pictures and other files that are not text cite nothing.
        if let Ok(text) = fs::read_to_string(&path) {
            violations.extend(pages::cited_paths(&relative(&root, &path), &text, &known));
        }
    }
    assert_none("cited paths", &violations);
}

#[test]
fn named_functions_exist() {
    let root = workspace_root();
    let page = fs::read_to_string(root.join("ARCHITECTURE.md")).expect("the page");
    let text_of = |file: &str| fs::read_to_string(root.join(file)).unwrap_or_default();
    assert_none(
        "named functions",
        &pages::named_functions("ARCHITECTURE.md", &page, text_of),
    );
}

mod the_rules_themselves {
    use super::*;

    const BAD_CORE: &str = "crates/serving-core/src/x.rs";

    fn file(path: &str, text: &str) -> SourceFile {
        SourceFile::new(path, text)
    }

    #[test]
    fn comments_and_literals_are_not_code() {
        let text = "let a = \"HashMap // \\\" x\"; // HashMap\n/* HashMap /* y */ HashMap */ let c = '\"'; let r = r#\"Hash\"Map\"#;\
                    fn f<'a>(x: &'a str) {} let n = '\\n'; HashMap";
        let code = source::blank_comments_and_literals(text);
        assert_eq!(code.len(), text.len());
        assert_eq!(code.matches("HashMap").count(), 1, "{code}");
        assert!(code.contains("fn f<'a>(x: &'a str) {}"), "{code}");
    }

    #[test]
    fn test_items_are_told_from_product_code() {
        let text = "//! X.\nfn a() { b.unwrap() }\n#[cfg(test)]\nmod tests {\n    // c\n\n    fn t() { c.unwrap() }\n}\nfn z() {}\n";
        let file = file("crates/x/src/y.rs", text);
        assert_eq!(file.product.matches("unwrap").count(), 1);
        assert_eq!(file.test_code().matches("unwrap").count(), 1);
        assert_eq!(file.product_line_count(), 3);
        assert_eq!(rules::banned_calls(&file).len(), 1);
        assert_eq!(file.crate_dir(), "crates/x");
    }

    #[test]
    fn functions_are_measured() {
        let long = format!(
            "//! X.\nfn short() -> [u8; 3] {{ [1; 3] }}\nfn long() {{\n{}}}\nfn declared();\n",
            "a();\n".repeat(70)
        );
        let found = functions(&long);
        assert_eq!(found.iter().map(|f| f.line_count).collect::<Vec<_>>(), [1, 72]);
        assert_eq!(rules::function_size(&file("crates/x/src/y.rs", &long)).len(), 1);
    }

    #[test]
    fn sizes_and_headers_are_checked() {
        let big = format!("//! A sentence.\n{}", "x\n".repeat(500));
        assert_eq!(rules::file_size(&file("crates/x/src/y.rs", &big)).len(), 1);
        assert_eq!(rules::header(&file("crates/x/src/y.rs", "use a;\n")).len(), 1);
        assert_eq!(
            rules::header(&file("crates/x/src/lib.rs", &"//! Line.\n".repeat(13))).len(),
            1
        );
        assert_eq!(
            rules::header(&file("crates/x/src/lib.rs", "//! Owns the thing.\n")).len(),
            0
        );
    }

    #[test]
    fn bans_hold_where_they_should_and_can_be_lifted_with_a_reason() {
        let core = "//! X.\nuse std::collections::HashMap;\nfn f() { SystemTime::now(); }\n";
        assert_eq!(rules::banned_calls(&file(BAD_CORE, core)).len(), 2);
        assert_eq!(rules::banned_calls(&file("crates/engine/src/x.rs", core)).len(), 0);
        let sleep = "fn t() { std::thread::sleep(d); }";
        assert_eq!(rules::banned_calls(&file("crates/x/tests/t.rs", sleep)).len(), 1);
        assert_eq!(rules::banned_calls(&file("crates/x/src/t.rs", sleep)).len(), 0);
        let allowed =
            "// tidy: allow(sleep) because the thing is timed by the wall clock\nfn t() { std::thread::sleep(d); }";
        assert_eq!(rules::banned_calls(&file("crates/x/tests/t.rs", allowed)).len(), 0);
    }

    #[test]
    fn unsafe_code_needs_a_place_and_a_reason() {
        let bare = "//! X.\nfn f() { unsafe { g() } }\n";
        let explained = "//! X.\nfn f() {\n    // SAFETY: g has no preconditions.\n    unsafe { g() }\n}\n";
        assert_eq!(rules::unsafe_code(&file("crates/cli/src/x.rs", explained)).len(), 1);
        assert_eq!(rules::unsafe_code(&file("crates/engine/src/x.rs", bare)).len(), 1);
        assert_eq!(rules::unsafe_code(&file("crates/engine/src/x.rs", explained)).len(), 0);
    }

    #[test]
    fn a_crate_that_does_not_forbid_unsafe_code_is_found() {
        let check = |files: &[(&str, &str)]| {
            let files: Vec<SourceFile> = files.iter().map(|(path, text)| file(path, text)).collect();
            rules::forbidden_unsafe(&files).len()
        };
        let (plain, forbids) = ("fn f() {}\n", "#![forbid(unsafe_code)]\nfn f() {}\n");
        for root in [
            "a/src/lib.rs",
            "a/src/main.rs",
            "a/tests/x.rs",
            "a/tests/x/main.rs",
            "crates/a/build.rs",
        ] {
            assert_eq!(check(&[(root, plain)]), 1, "{root}");
            assert_eq!(check(&[(root, forbids)]), 0, "{root}");
        }
        assert_eq!(check(&[("a/src/b/tests/main.rs", plain), ("a/src/b.rs", plain)]), 0);
        let lib = ("a/src/lib.rs", plain);
        assert_eq!(check(&[lib, ("a/src/b.rs", "unsafe fn f() {}\n")]), 0);
        assert_eq!(
            check(&[
                lib,
                ("a/tests/b.rs", "#![forbid(unsafe_code)]\n"),
                ("a/tests/c.rs", "unsafe fn f() {}\n")
            ]),
            1
        );
    }

    #[test]
    fn a_dependency_that_is_not_allowed_is_found() {
        let rules = dependencies::Rules::parse(
            "[licenses]\nallow = [\"MIT\", \"ISC\"]\n[sources]\nallow-registry = [\"https://x\"]\n\
             [bans]\ndeny = [{ crate = \"gone\" }, { crate = \"once\", deny-multiple-versions = true }]\n",
        );
        let check = |packages: &[(&str, &str, &str)]| {
            let packages: Vec<_> = packages
                .iter()
                .map(|(name, license, source)| dependencies::Package::new(name, license, source))
                .collect();
            rules.violations(&packages).len()
        };
        assert_eq!(
            check(&[
                ("a", "GPL-3.0-only OR (MIT AND ISC)", "registry+https://x"),
                ("once", "MIT/Zlib", "")
            ]),
            0
        );
        for license in [
            "GPL-3.0-only",
            "MIT AND Zlib",
            "(MIT OR ISC) AND Zlib",
            "",
            "MIT WITH x",
            "MIT OR",
        ] {
            assert_eq!(check(&[("a", license, "")]), 1, "{license}");
        }
        assert_eq!(check(&[("a", "MIT", "git+https://x")]), 1);
        assert_eq!(check(&[("gone", "MIT", "")]), 1);
        assert_eq!(check(&[("once", "MIT", ""), ("once", "MIT", "")]), 1);
    }

    #[test]
    fn wire_types_are_found_by_path_and_by_name() {
        let check = |text: &str| rules::wire_types(&file("coordinator/src/x.rs", text)).len();
        assert_eq!(check("//! X.\npub fn f(x: proto::v1::Peer) {}\n"), 1);
        assert_eq!(
            check(
                "//! X.\nuse proto::v1::{Peer, open::Mode as M};\npub struct A {\n    pub m: M,\n    pub b: u8,\n}\n"
            ),
            1
        );
        assert_eq!(
            check(
                "//! X.\nuse proto::v1::Peer;\nfn f(x: Peer) {}\npub(crate) fn g(x: Peer) {}\npub fn h() { Peer::new(); }\n"
            ),
            0
        );
    }

    #[test]
    fn a_label_that_its_list_lacks_is_found() {
        let check = |lists: &str| {
            let name = "    fn name(self) -> &'static str {\n        match self {\n            A => \"a\",\n            B => \"b\",\n        }\n    }\n}\n";
            let text = format!("//! X.\nimpl E {{\n{lists}{name}");
            rules::closed_labels(&file("crates/x/src/y.rs", &text)).len()
        };
        assert_eq!(check("    const NAMES: [&str; 2] = [\"a\", \"b\"];\n"), 0);
        assert_eq!(check("    const NAMES: [&str; 1] = [\"a\"];\n"), 1);
        assert_eq!(check("    const ALL: [E; 2] = [E::A, E::B];\n"), 0);
        assert_eq!(check("    const ALL: [E; 1] = [E::A];\n"), 1);
    }

    #[test]
    fn a_forbidden_edge_is_found() {
        let core = Manifest::parse(
            "crates/serving-core",
            "[package]\nname = \"serving-core\"\n[dependencies]\ntokio.workspace = true\n",
        );
        let engine = Manifest::parse("crates/engine", "[package]\nname = \"engine\"\n");
        let front = "[package]\nname = \"coordinator\"\n[dependencies]\nengine = { workspace = true }\nserde = \"1\"\n";
        let front = Manifest::parse("coordinator", front);
        assert_eq!(layering::violations(&[core, engine, front]).len(), 3);
    }

    #[test]
    fn reading_outside_is_found() {
        let text = format!("open(\"{}/shared/golden\")\n", "..");
        assert_eq!(rules::reads_outside("tests/x.py", &text).len(), 1);
    }
}
