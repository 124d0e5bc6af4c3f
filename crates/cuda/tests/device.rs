//! The owned types on the false driver: order between streams, pinned memory, graphs, memory of other processes, errors. Each
//! task runs in a process of its own, whose driver reports races, misuse and leaks at its end.
//!
//! `BATON_FALSE_CUDA` names the folder that `scripts/false-cuda` makes; without it `target/false-cuda` is taken.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on must stop")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use cuda::nvrtc::{Arch, Source, compile};
use cuda::{
    Args, Device, Event, EventUse, Fault, Function, Geometry, Image, IpcEventHandle, IpcHandle, Libraries, Search,
    Stream,
};

const TASK: &str = "BATON_DEVICE_TASK";
const HANDLES: &str = "BATON_DEVICE_HANDLES";
const COUNT: usize = 1_000;
const BYTES: usize = COUNT * 4;
/// Adds one to each number.
const SOURCE: &str = r#"
extern "C" __global__ void increment(unsigned *values, unsigned count) {
    unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) values[at] += 1;
}
"#;

fn folder() -> PathBuf {
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

fn process(task: &str, variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "a_task", "--ignored", "--nocapture"])
        .env(TASK, task)
        .envs(variables.iter().copied());
    command.output().unwrap()
}

/// Runs a task with two orders of work. The driver finds nothing, and nothing is left.
fn run(task: &str) {
    for seed in ["1", "2"] {
        let scratch = tempfile::tempdir().unwrap();
        let report = scratch.path().join("report.json");
        let output = process(
            task,
            &[
                ("FALSE_CUDA_SEED", seed),
                ("FALSE_CUDA_REPORT", report.to_str().unwrap()),
            ],
        );
        assert!(output.status.success(), "{task}, seed {seed}: {output:?}");
        let text = std::fs::read_to_string(&report).unwrap();
        let report: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert!(report["findings"].as_array().unwrap().is_empty(), "{task}: {text}");
        for (kind, count) in report["leaks"].as_object().unwrap() {
            assert_eq!(count.as_u64(), Some(0), "{task}: leaked {kind}: {text}");
        }
    }
}

#[test]
#[ignore = "the other tests start it with a task"]
fn a_task() {
    let search = Search {
        explicit_folders: vec![folder()],
        ..Search::default()
    };
    let libraries = Libraries::find(&search);
    let device = Device::open(&libraries, 0).unwrap_or_else(|error| panic!("{error}\n{}", libraries.report()));
    match std::env::var(TASK).unwrap().as_str() {
        "streams" => two_streams(&libraries, &device),
        "graph" => a_graph(&libraries, &device),
        "errors" => errors(&libraries, &device),
        "newer" => a_code_of_a_newer_driver(&device),
        "ipc" => memory_for_another_process(&device),
        "ipc-child" => memory_of_another_process(&device),
        other => panic!("{other} is no task"),
    }
}

fn increment(libraries: &Libraries, device: &Device) -> Function {
    let source = Source {
        name: "increment.cu".to_owned(),
        text: SOURCE.to_owned(),
        headers: Vec::new(),
        defines: Vec::new(),
        options: Vec::new(),
    };
    let arch = Arch::of(device.facts().compute_capability).unwrap();
    let compiled = compile(libraries, &source, arch).unwrap();
    device
        .load(&Image::Ptx(compiled.ptx))
        .unwrap()
        .function("increment")
        .unwrap()
}

fn geometry(threads: u32) -> Geometry {
    Geometry {
        grid: [(COUNT as u32).div_ceil(threads), 1, 1],
        block: [threads, 1, 1],
        shared_bytes: 0,
    }
}

fn numbers(bytes: &[u8]) -> Vec<u32> {
    bytes
        .chunks_exact(4)
        .map(|bytes| u32::from_le_bytes(bytes.try_into().unwrap()))
        .collect()
}

/// One stream copies, another one computes and copies back; events order them, and the host waits once.
fn two_streams(libraries: &Libraries, device: &Device) {
    let function = increment(libraries, device);
    let (copies, work) = (device.stream().unwrap(), device.stream().unwrap());
    let memory = device.allocate(BYTES).unwrap();
    let mut staged = device.allocate_pinned(BYTES).unwrap();
    let values: Vec<u8> = (0..COUNT as u32).flat_map(u32::to_le_bytes).collect();
    staged.write(0, &values).unwrap();
    let (copied, begun, ended) = (
        device.event(EventUse::Order).unwrap(),
        device.event(EventUse::Timing).unwrap(),
        device.event(EventUse::Timing).unwrap(),
    );
    copies.copy_to_device(memory.ptr(), &staged, 0..BYTES).unwrap();
    copies.record(&copied).unwrap();
    work.wait(&copied).unwrap();
    work.record(&begun).unwrap();
    let args = Args::new().pointer(memory.ptr()).u32(COUNT as u32);
    work.launch(&function, geometry(128), &args).unwrap();
    work.record(&ended).unwrap();
    let back = device.allocate_pinned(BYTES).unwrap();
    work.copy_to_host(&back, 0, memory.ptr(), BYTES).unwrap();
    work.synchronize().unwrap();
    assert!(ended.is_done().unwrap() && ended.ms_since(&begun).unwrap() >= 0.0);
    let got = numbers(&back.read().unwrap());
    assert_eq!(got, (1..=COUNT as u32).collect::<Vec<u32>>());
}

/// A captured kernel runs as often as the graph is launched. What would break a capture is refused before the driver sees it.
fn a_graph(libraries: &Libraries, device: &Device) {
    let function = increment(libraries, device);
    let stream = device.stream().unwrap();
    let memory = device.allocate(BYTES).unwrap();
    stream.fill(memory.ptr(), 0, BYTES).unwrap();
    let args = Args::new().pointer(memory.ptr()).u32(COUNT as u32);
    let graph = stream.capture(|stream| {
        let refused = device.allocate(16).unwrap_err();
        assert_eq!(refused.fault(), Fault::Baton, "{refused}");
        stream.launch(&function, geometry(256), &args)
    });
    let graph = graph.unwrap();
    for _ in 0..3 {
        stream.launch_graph(&graph).unwrap();
    }
    assert_eq!(read(device, &stream, memory.ptr()), vec![3; COUNT]);
}

fn read(device: &Device, stream: &Stream, from: cuda::DevicePtr) -> Vec<u32> {
    let back = device.allocate_pinned(BYTES).unwrap();
    stream.copy_to_host(&back, 0, from, BYTES).unwrap();
    stream.synchronize().unwrap();
    numbers(&back.read().unwrap())
}

/// Each error names its call and says whose fault it is; none of these ends the use of the device.
fn errors(libraries: &Libraries, device: &Device) {
    let function = increment(libraries, device);
    let stream = device.stream().unwrap();
    let memory = device.allocate(BYTES).unwrap();
    let args = Args::new().pointer(memory.ptr()).u32(COUNT as u32);
    let too_wide = stream.launch(&function, geometry(2_048), &args).unwrap_err();
    assert_eq!(
        (too_wide.call, too_wide.fault()),
        ("cuLaunchKernel", Fault::Baton),
        "{too_wide}"
    );
    let free_bytes = device.memory().unwrap().free_bytes;
    let too_much = device.allocate(free_bytes as usize + 1).unwrap_err();
    assert!(
        too_much.is_out_of_memory() && too_much.fault() == Fault::Memory,
        "{too_much}"
    );
    let none = device.load(&Image::Cubin(b"<html>".to_vec())).unwrap_err();
    assert_eq!(none.code(), None, "the driver was not asked: {none}");
    let other = Device::open(libraries, 9).unwrap_err();
    assert_eq!(other.fault(), Fault::Setup, "{other}");
    stream.fill(memory.ptr(), 7, BYTES).unwrap();
    assert_eq!(read(device, &stream, memory.ptr()), vec![0x0707_0707; COUNT]);
}

/// No header has the code yet that the driver answers the first time.
fn a_code_of_a_newer_driver(device: &Device) {
    let error = device.allocate(BYTES).unwrap_err();
    assert_eq!((error.code(), error.fault()), (Some(54_321), Fault::Baton), "{error}");
    assert!(!error.is_sticky() && error.to_string().contains("54321"), "{error}");
    device.allocate(BYTES).unwrap();
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> [u8; 64] {
    std::array::from_fn(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap())
}

/// A child writes into memory of this process and says by an event when it is written.
fn memory_for_another_process(device: &Device) {
    let memory = device.allocate(BYTES).unwrap();
    let stream = device.stream().unwrap();
    stream.fill(memory.ptr(), 1, BYTES).unwrap();
    stream.synchronize().unwrap();
    let event = device.event(EventUse::Interprocess).unwrap();
    let refused = device.event(EventUse::Timing).unwrap().ipc_handle();
    assert!(refused.is_err(), "an event that tells the time is for one process");
    let handle = memory.ipc_handle().unwrap();
    assert!(device.open_ipc(&handle).is_err(), "a handle of this process");
    let handles = format!("{},{}", hex(&handle.0), hex(&event.ipc_handle().unwrap().0));
    let output = process("ipc-child", &[(HANDLES, &handles), ("FALSE_CUDA_REPORT", "/dev/null")]);
    assert!(output.status.success(), "{output:?}");
    stream.wait(&event).unwrap();
    assert_eq!(read(device, &stream, memory.ptr()), vec![0x0909_0909; COUNT]);
}

fn memory_of_another_process(device: &Device) {
    let handles = std::env::var(HANDLES).unwrap();
    let (memory, event) = handles.split_once(',').unwrap();
    let memory = device.open_ipc(&IpcHandle(from_hex(memory))).unwrap();
    let event = Event::open(device, &IpcEventHandle(from_hex(event))).unwrap();
    let stream = device.stream().unwrap();
    stream.fill(memory.ptr(), 9, BYTES).unwrap();
    stream.record(&event).unwrap();
    stream.synchronize().unwrap();
}

#[test]
fn events_order_two_streams_and_the_host() {
    run("streams");
}

#[test]
fn a_graph_runs_as_often_as_it_is_launched() {
    run("graph");
}

#[test]
fn errors_name_the_call_and_whose_fault_it_is() {
    run("errors");
}

#[test]
fn a_code_that_the_bindings_do_not_know_is_an_error_like_others() {
    let output = process("newer", &[("FALSE_CUDA_FAIL", "cuMemAlloc_v2:1:54321")]);
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn memory_is_shared_with_another_process() {
    run("ipc");
}
