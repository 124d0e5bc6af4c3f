//! `baton doctor --gpu` and `baton kernels build` as a shell sees them: without a GPU, on the false driver, with wrong kernels,
//! with a broken handoff, and in each situation of the libraries.
//!
//! `BATON_FALSE_CUDA` names the folder that `scripts/false-cuda` makes; without it `target/false-cuda` is taken. A machine
//! without the folder fails these tests: a kernel check that is skipped is a kernel that nobody has run.

#![forbid(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use model_files::test_kit::TinyModel;
use serde_json::Value;
use sha2::{Digest, Sha256};

/// Compiled kernels, for all tests and the next run.
fn compiled() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("compiled-kernels")
}

fn false_cuda() -> PathBuf {
    let usual = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("false-cuda");
    let folder = std::env::var_os("BATON_FALSE_CUDA").map_or(usual, PathBuf::from);
    assert!(
        folder.join("libcuda.so.1").exists(),
        "{} has no false driver: run `cargo build --release -p false-cuda` and `scripts/false-cuda {}`",
        folder.display(),
        folder.display()
    );
    folder
}

/// `baton` on the false driver, without any library of this machine's user.
fn baton(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command
        .args(arguments)
        .env_remove("VIRTUAL_ENV")
        .env_remove("CUDA_VISIBLE_DEVICES")
        .env("BATON_CUDA_PATH", false_cuda())
        .env("BATON_KERNEL_CACHE", compiled())
        .envs(variables.iter().copied());
    command.output().expect("it starts")
}

fn status_and_json(output: &Output) -> (Option<i32>, Value) {
    let said = String::from_utf8_lossy(&output.stdout);
    let json = serde_json::from_str(&said).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    (output.status.code(), json)
}

fn checks(report: &Value) -> Vec<&Value> {
    let groups = report["kernels"].as_array().expect("groups");
    groups
        .iter()
        .flat_map(|group| group["checks"].as_array().unwrap_or_else(|| panic!("{group}")))
        .collect()
}

/// A row of the report.
fn step<'a>(report: &'a Value, name: &str) -> &'a Value {
    let steps = report["steps"].as_array().expect("steps");
    let found = steps.iter().find(|step| step["step"] == name);
    found.unwrap_or_else(|| panic!("no step {name} in {report}"))
}

/// Each process left a report with no finding and no leak. Those that were killed left none. Returns how many kernels ran.
fn assert_nothing_was_found(reports: &Path) -> u64 {
    let mut launches = 0;
    for entry in fs::read_dir(reports).expect("the folder") {
        let text = fs::read_to_string(entry.expect("an entry").path()).expect("a report");
        let report: Value = serde_json::from_str(&text).expect("JSON");
        launches += report["launches"].as_u64().expect("a number");
        assert_eq!(report["findings"].as_array().map(Vec::len), Some(0), "{text}");
        for (kind, count) in report["leaks"].as_object().expect("counts") {
            assert_eq!(count.as_u64(), Some(0), "leaked {kind}: {text}");
        }
    }
    launches
}

/// The false driver orders its work by the seed, and reports what breaks CUDA's rules: races, reads of what nobody wrote,
/// leaks. Each group of kernels, and each other part, is a process with a report of its own.
fn every_kernel_is_right(seed: &str, more: &[&str]) -> Value {
    let reports = tempfile::tempdir().expect("a folder");
    let report = reports.path().join("%p.json");
    let report = report.to_str().expect("a plain path");
    let page = reports.path().join("page.md");
    let page_path = page.to_str().expect("a plain path");
    let variables = [("FALSE_CUDA_SEED", seed), ("FALSE_CUDA_REPORT", report)];
    let mut arguments = vec!["doctor", "--gpu", "--json", "--seed", seed, "--report", page_path];
    arguments.extend(more);
    let output = baton(&arguments, &variables);
    let (status, json) = status_and_json(&output);
    for check in checks(&json) {
        assert_eq!(check["is_right"], true, "{check}");
    }
    assert_eq!(status, Some(0), "{output:?}");
    let written = fs::read_to_string(&page).expect("the page");
    assert!(written.contains("Every kernel is right on GPU 0"), "{written}");
    fs::remove_file(page).expect("it is there");
    let launches = assert_nothing_was_found(reports.path());
    assert!(launches > 100, "{launches} launches");
    json
}

/// Everything that the command does when nothing is asked for or left out.
#[test]
fn every_kernel_and_the_handoff_are_right_in_one_order_of_work_and_nothing_is_measured() {
    let json = every_kernel_is_right("1", &[]);
    for (name, outcome, count) in [
        ("kernels", "right", 0),
        ("cuda-ipc", "right", 5),
        ("nccl", "right", 7),
        ("machine", "not_run", 0),
        ("model", "not_run", 0),
        ("sanitize", "not_run", 0),
    ] {
        let step = step(&json, name);
        assert_eq!(step["outcome"], outcome, "{step}");
        assert_eq!(step["checks"].as_array().map(Vec::len), Some(count), "{step}");
    }
    let why = |name| step(&json, name)["why"].as_str().unwrap_or_default();
    assert!(why("machine").contains("false driver"), "{json}");
    assert!(why("model").contains("--model"), "{json}");
    assert_eq!(step(&json, "machine")["figures"].as_array().map(Vec::len), Some(0));
}

#[test]
fn every_kernel_is_right_in_another_order_of_work() {
    let json = every_kernel_is_right("2", &["--only", "kernels"]);
    for left_out in ["machine", "cuda-ipc", "nccl"] {
        assert_eq!(step(&json, left_out)["outcome"], "not_run");
    }
}

/// A driver that opens no memory of another process, and an NCCL whose ranks never meet.
#[test]
fn a_handoff_that_fails_is_named_and_fails_the_command() {
    let variables = [
        ("FALSE_CUDA_FAIL", "cuIpcOpenMemHandle_v2:1:201"),
        ("FALSE_NCCL_HANG", "init"),
    ];
    let output = baton(&["doctor", "--gpu", "--json", "--only", "handoff"], &variables);
    let (status, json) = status_and_json(&output);
    assert_eq!(status, Some(1), "{output:?}");
    for (name, reason) in [
        ("cuda-ipc", "cuIpcOpenMemHandle"),
        ("nccl", "the making of a communicator"),
    ] {
        let step = step(&json, name);
        assert_eq!(step["outcome"], "wrong", "{step}");
        assert!(step["why"].as_str().is_some_and(|why| why.contains(reason)), "{step}");
    }
}

#[test]
fn a_model_computes_on_the_gpu_what_it_computes_on_the_host() {
    let folder = tempfile::tempdir().expect("a folder");
    let reports = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("tiny.gguf");
    let model = TinyModel {
        head_dim: 64,
        ..TinyModel::default()
    };
    model.build().write(&path).expect("room for a tiny model");
    let report = reports.path().join("%p.json");
    let variables = [("FALSE_CUDA_REPORT", report.to_str().expect("a plain path"))];
    let path = path.to_str().expect("a plain path");
    let arguments = ["doctor", "--gpu", "--json", "--only", "model", "--model", path];
    let output = baton(&arguments, &variables);
    let (status, json) = status_and_json(&output);
    assert_eq!(step(&json, "model")["outcome"], "right", "{json}");
    assert_eq!(status, Some(0), "{output:?}");
    assert!(assert_nothing_was_found(reports.path()) > 100);
}

#[test]
fn what_cannot_be_done_here_is_not_run_or_refused() {
    let sanitize = [
        "doctor",
        "--gpu",
        "--json",
        "--sanitize",
        "--skip",
        "kernels,machine,handoff,model",
    ];
    let (status, json) = status_and_json(&baton(&sanitize, &[]));
    assert_eq!(status, Some(5), "nothing was checked: {json}");
    let step = step(&json, "sanitize");
    assert_eq!(step["outcome"], "not_run");
    assert!(
        step["why"].as_str().is_some_and(|why| why.contains("false driver")),
        "{step}"
    );
    let output = baton(&["doctor", "--gpu", "--model", "/no/such/model.gguf"], &[]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}

/// As `cuda_engine::kernels::cache` writes it: 16 bytes of magic, the hash of the content, the content.
fn change_kernel(file: &Path, change: impl FnOnce(&str) -> String) {
    let bytes = fs::read(file).expect("a compiled kernel");
    let (head, content) = bytes.split_at(48);
    let text = std::str::from_utf8(content).expect("PTX");
    let changed = change(text);
    assert!(text != changed, "{} has nothing to change", file.display());
    let hash = Sha256::digest(changed.as_bytes());
    fs::write(file, [&head[..16], hash.as_slice(), changed.as_bytes()].concat()).expect("written");
}

/// In the entry of that name, the first instruction becomes another one.
fn swapped(text: &str, entry: &str, (from, to): (&str, &str)) -> String {
    let at = text.find(&format!(".entry {entry}(")).expect("the entry");
    let (before, after) = text.split_at(at);
    format!("{before}{}", after.replacen(from, to, 1))
}

#[test]
fn a_wrong_kernel_is_named_and_fails_the_command() {
    let wrong = [
        ("rows", "norm", "rms_norm", ("add.f32", "sub.f32"), "RmsNorm"),
        ("rows", "gate", "gate_silu", ("mul.f32", "add.f32"), "GateSilu"),
        (
            "bytes",
            "dequantise",
            "dequantise_q8_0",
            ("mul.rn.f32", "add.rn.f32"),
            "DequantiseQ8_0",
        ),
    ];
    for (group, file, entry, change, kernel) in wrong {
        // The compiled kernels are there after this.
        let output = baton(&["doctor", "--gpu", "--kernel-group", group], &[]);
        assert!(output.status.success(), "{output:?}");
        let folder = tempfile::tempdir().expect("a folder");
        for entry in fs::read_dir(compiled()).expect("compiled kernels") {
            let entry = entry.expect("an entry");
            fs::copy(entry.path(), folder.path().join(entry.file_name())).expect("copied");
        }
        let find = |path: &PathBuf| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with(&format!("{file}.")))
        };
        let copies = fs::read_dir(folder.path()).expect("copies");
        let copy = copies.map(|copy| copy.expect("an entry").path()).find(find);
        change_kernel(&copy.expect("the kernel's file"), |text| swapped(text, entry, change));
        let cache = folder.path().to_str().expect("a plain path");
        let variables = [("BATON_KERNEL_CACHE", cache)];
        let output = baton(&["doctor", "--gpu", "--kernel-group", group], &variables);
        let (_, checks) = status_and_json(&output);
        let wrong = checks
            .as_array()
            .expect("checks")
            .iter()
            .filter(|check| check["is_right"] == false);
        let wrong: Vec<&str> = wrong.filter_map(|check| check["kernel"].as_str()).collect();
        assert!(
            !wrong.is_empty() && wrong.iter().all(|name| *name == kernel),
            "{kernel}: {wrong:?}"
        );
    }
}

#[test]
fn a_machine_without_a_gpu_is_told_so_and_nothing_is_checked() {
    // With a driver, the empty list hides its GPUs.
    let variables = [("BATON_CUDA_PATH", ""), ("CUDA_VISIBLE_DEVICES", "")];
    let output = baton(&["doctor", "--gpu"], &variables);
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(5), "{output:?}");
    assert!(said.contains("Not run: this machine has no GPU"), "{said}");
}

/// What is set, where the decision stands in the report, the decision, and the exit status.
type Situation<'a> = (&'a [(&'a str, &'a str)], &'a str, &'a str, i32);

#[test]
fn each_situation_of_the_libraries_has_its_decision_and_its_status() {
    let driver_only = tempfile::tempdir().expect("a folder");
    std::os::unix::fs::symlink(
        false_cuda().join("libcuda.so.1"),
        driver_only.path().join("libcuda.so.1"),
    )
    .expect("a link");
    let driver_only = driver_only.path().to_str().expect("a plain path");
    let situations: &[Situation<'_>] = &[
        (&[], "/driver/decision", "ready", 0),
        (&[("FALSE_CUDA_DEVICES", "0")], "/driver/decision", "no_device", 5),
        (&[("FALSE_CUDA_VERSION", "11080")], "/driver/decision", "too_old", 5),
        (&[("FALSE_CUDA_VERSION", "0")], "/driver/decision", "stub", 5),
        (
            &[("FALSE_CUDA_VERSION", "12040")],
            "/nvrtc/decision",
            "driver_too_old",
            5,
        ),
        (
            &[("FALSE_CUDA_FAIL", "cuInit:1:3")],
            "/driver/decision",
            "init_failed",
            5,
        ),
        (&[("CUDA_VISIBLE_DEVICES", "")], "/driver/decision", "devices_hidden", 5),
        (
            &[("CUDA_VISIBLE_DEVICES", "7")],
            "/driver/decision",
            "devices_invalid",
            5,
        ),
        (&[("BATON_CUDA_PATH", driver_only)], "/nvrtc/decision", "not_found", 5),
    ];
    for (variables, place, decision, status) in situations {
        let output = baton(&["doctor", "--gpu", "--loader-only", "--json"], variables);
        let (ended, json) = status_and_json(&output);
        assert_eq!(
            json["loader"].pointer(place),
            Some(&Value::from(*decision)),
            "{variables:?}: {json}"
        );
        assert_eq!(ended, Some(*status), "{variables:?}: {output:?}");
    }
}

#[test]
fn a_gpu_without_kernels_is_not_checked_and_not_called_wrong() {
    for (arguments, variables, reason) in [
        (&["doctor", "--gpu"][..], &[("FALSE_CUDA_CC", "7.5")][..], "too old"),
        (
            &["doctor", "--gpu", "--device", "5"][..],
            &[][..],
            "GPU 5 cannot be opened",
        ),
    ] {
        let output = baton(arguments, variables);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(5), "{output:?}");
        assert!(said.contains(reason) && said.contains("NVRTC"), "{said}");
    }
}

#[test]
fn a_gpu_that_fails_is_no_gpu_that_is_right() {
    let variables = [("FALSE_CUDA_FAIL", "cuMemAlloc_v2:1:2")];
    let output = baton(&["doctor", "--gpu", "--kernel-group", "bytes"], &variables);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(said.contains("OUT_OF_MEMORY"), "{said}");
}

/// Registers of each kernel, as this version of NVRTC gives them, for every architecture. After a change of a kernel write the table
/// anew: `BATON_CUDA_PATH=target/false-cuda baton kernels build --arch sm_80,sm_89,sm_90a,sm_100a,sm_120 >
/// crates/cuda-engine/kernels/resources.txt`. Its first line names the sources and the compiler, so a table of others fails here, although only one
/// architecture is compiled: all five take a minute.
#[test]
fn kernels_are_compiled_for_every_gpu_without_one_and_none_spills() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("kernels");
    let out = out.to_str().expect("a plain path");
    let arguments = ["kernels", "build", "--arch", "sm_90a", "--out", out];
    let output = baton(&arguments, &[("FALSE_CUDA_DEVICES", "0")]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let said = String::from_utf8_lossy(&output.stdout);
    let stored = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cuda-engine/kernels/resources.txt");
    let stored = fs::read_to_string(stored).expect("the table");
    let of_arch = |arch: &str| {
        let is_one = |line: &&str| line.starts_with(&format!("{arch} "));
        stored.lines().filter(is_one).collect::<Vec<&str>>()
    };
    let mut said = said.lines();
    assert_eq!(
        said.next(),
        stored.lines().next(),
        "the table is of other sources or another compiler"
    );
    let (said, compiled) = (said.collect::<Vec<&str>>(), of_arch("sm_90a"));
    let differs = |(new, old): (&&str, &&str)| (new != old).then(|| format!("{new}, before: {old}"));
    let different: Vec<String> = said.iter().zip(&compiled).filter_map(differs).collect();
    assert!(different.is_empty(), "{different:#?}");
    for arch in ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120"] {
        let kernels = of_arch(arch);
        assert_eq!(kernels.len(), said.len(), "{arch}");
        assert!(
            kernels.iter().all(|line| line.ends_with("stack 0 spills 0")),
            "{kernels:#?}"
        );
    }
    assert!(
        fs::read_dir(out).expect("the folder").count() > 20,
        "one file for each unit and architecture"
    );
    let output = baton(&["kernels", "build", "--arch", "sm_70x"], &[]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}
