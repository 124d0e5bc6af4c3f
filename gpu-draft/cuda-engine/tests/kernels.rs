//! Every kernel on the false driver, against the host: each group of checks in a process of its own, with two orders of work.
//!
//! `BATON_FALSE_CUDA` names a folder with the false `libcuda.so` and NVRTC's two libraries. A test without it fails and says
//! how the folder is made: a test that is skipped is a kernel that nobody has run.

use std::path::{Path, PathBuf};
use std::process::Command;

use cuda::nvrtc::Arch;
use cuda::{Device, Libraries, Search};
use cuda_engine::kernels::cache::KernelCache;
use cuda_engine::kernels::check::{Bench, Extent, Group};
use cuda_engine::kernels::{AttentionShape, ImageForm, Target};

const FOLDER: &str = "BATON_FALSE_CUDA";
/// Tells a child process what to check: the name of a group, or "gate".
const TASK: &str = "BATON_KERNEL_CHECK";
const CACHE: &str = "BATON_KERNEL_CACHE";
/// The false driver orders threads and operations by it; the numbers come from it, too.
const SEEDS: [u64; 2] = [1, 2];

fn folder() -> PathBuf {
    let path = std::env::var_os(FOLDER).unwrap_or_else(|| {
        panic!(
            "{FOLDER} is not set. `cargo build -p false-cuda` builds target/debug/libcuda.so; `scripts/kernels-check` fetches NVRTC. \
             Put libcuda.so, libnvrtc.so.13 and libnvrtc-builtins.so.13.0 into one folder, by links, and name it"
        )
    });
    PathBuf::from(path)
}

/// Runs a task in a process of its own and looks at the false driver's report.
fn check(task: &str) {
    let folder = folder();
    let cache = std::env::temp_dir().join("baton-kernel-tests");
    for seed in SEEDS {
        let scratch = tempfile::tempdir().unwrap();
        let report = scratch.path().join("report.json");
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "one_task_in_a_process_of_its_own", "--ignored", "--nocapture"])
            .env(TASK, task)
            .env(CACHE, &cache)
            .env("BATON_CUDA_PATH", &folder)
            .env("FALSE_CUDA_CC", "9.0")
            .env("FALSE_CUDA_SEED", seed.to_string())
            .env("FALSE_CUDA_REPORT", &report)
            .output()
            .unwrap();
        let said = format!("{}{}", String::from_utf8_lossy(&child.stdout), String::from_utf8_lossy(&child.stderr));
        assert!(child.status.success(), "{task}, seed {seed}: {said}");
        assert_nothing_was_found(&report, task);
    }
}

fn assert_nothing_was_found(report: &Path, task: &str) {
    let text = std::fs::read_to_string(report).unwrap_or_else(|error| panic!("{task}: the driver left no report: {error}"));
    let report: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert!(report["launches"].as_u64().unwrap() > 0, "{task}: no kernel ran: {text}");
    let findings = report["findings"].as_array().unwrap();
    assert!(findings.is_empty(), "{task}: {findings:#?}");
    for (kind, count) in report["leaks"].as_object().unwrap() {
        assert_eq!(count.as_u64(), Some(0), "{task}: leaked {kind}");
    }
}

#[test]
#[ignore = "the other tests start it with a task"]
fn one_task_in_a_process_of_its_own() {
    let task = std::env::var(TASK).expect("the parent names a task");
    let seed = std::env::var("FALSE_CUDA_SEED").unwrap().parse().unwrap();
    let libraries = Libraries::find(&Search::from_environment(Vec::new()));
    let device = Device::open(&libraries, 0).unwrap();
    let cache = KernelCache::at(std::env::var_os(CACHE).unwrap().into());
    let target = Target {
        libraries: &libraries,
        arch: Arch::of(device.facts().compute_capability),
        nvrtc_version: libraries.nvrtc_version().unwrap(),
        // The false driver runs text.
        form: ImageForm::Ptx,
        cache: Some(&cache),
    };
    let mut bench = Bench::new(&device, &target).unwrap();
    let (groups, extent) = match Group::ALL.into_iter().find(|group| group.name() == task) {
        Some(group) => (vec![group], Extent::Whole),
        None => (Group::ALL.to_vec(), Extent::Gate(AttentionShape::new(64, 9, 3).unwrap())),
    };
    for group in groups {
        let outcomes = group.run(&mut bench, extent, seed).unwrap();
        assert!(!outcomes.is_empty());
        for outcome in outcomes {
            println!("{outcome:?}");
            assert!(outcome.is_right, "{outcome:?}");
        }
    }
}

#[test]
fn kernels_of_rows_match_the_host() {
    check("rows");
}

#[test]
fn rope_and_the_pool_match_the_host() {
    check("rope");
}

#[test]
fn prefill_attention_matches_the_host() {
    check("prefill");
}

#[test]
fn decode_attention_matches_the_host() {
    check("decode");
}

#[test]
fn products_match_the_host_with_equal_bits_by_both_tiles() {
    check("product");
}

#[test]
fn copies_hashes_and_weights_match_the_host_bit_for_bit() {
    check("bytes");
}

#[test]
fn drawn_tokens_are_those_of_the_host() {
    check("sampling");
}

#[test]
fn the_gate_runs_every_kernel_once() {
    check("gate");
}
