//! Memory and events that two processes share. The other process is this program, which runs one test.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use false_cuda::IpcHandle;
use ptx_vm::FindingKind;

use crate::kernels::increment;
use crate::support::{
    DISABLE_TIMING, INTERPROCESS, Session, allocate, assert_clean, assert_found, cu, download, get, launch, ok, report,
    stream, upload, zeros,
};

const OTHER_PROCESS: &str = "FALSE_CUDA_OTHER_PROCESS";

/// Whether this is the other process. Its tests do nothing in the first one.
pub(crate) fn is_other_process() -> bool {
    std::env::var_os(OTHER_PROCESS).is_some()
}

/// Starts this program as the other process, with one test.
pub(crate) fn other_process(test: &str, variables: &[(&str, String)]) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", test, "--nocapture"])
        .env(OTHER_PROCESS, "1")
        .envs(variables.iter().cloned());
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn to_text(handle: &IpcHandle) -> String {
    handle.reserved.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Of a variable of the other process. It holds several bytes for each pair of digits.
fn handle_of(variable: &str) -> IpcHandle {
    let text = std::env::var(variable).unwrap();
    let byte = |at: usize| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap();
    IpcHandle {
        reserved: std::array::from_fn(byte),
    }
}

fn memory_handle(at: u64) -> IpcHandle {
    let mut handle = IpcHandle { reserved: [0; 64] };
    ok!(cuIpcGetMemHandle((&mut handle).into(), at));
    handle
}

fn event_handle(event: u64) -> IpcHandle {
    let mut handle = IpcHandle { reserved: [0; 64] };
    ok!(cuIpcGetEventHandle((&mut handle).into(), event));
    handle
}

fn shared_event() -> u64 {
    get(|event| cu!(cuEventCreate(event, INTERPROCESS | DISABLE_TIMING)))
}

/// Waits until the other process says a word. What its test harness prints is passed over.
fn hear(from: &mut impl BufRead, word: &str) {
    let mut line = String::new();
    while !line.ends_with(&format!("{word}\n")) {
        line.clear();
        assert_ne!(
            from.read_line(&mut line).unwrap(),
            0,
            "the other process has ended before `{word}`"
        );
    }
}

/// Waits until the first process says a word.
fn hear_first(word: &str) {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    assert_eq!(line.trim(), word);
}

/// The device of the process that does not call works by itself, as both processes wait for each other.
fn session() -> Session {
    Session::new(&[("FALSE_CUDA_IDLE_MS", "1"), ("FALSE_CUDA_SEED", "3")])
}

/// Adds 1 to four words of the first process, and says so by an event.
#[test]
fn adds_one() {
    if !is_other_process() {
        return;
    }
    let _session = session();
    let at = get(|at| cu!(cuIpcOpenMemHandle_v2(at, handle_of("MEMORY"), 1)));
    let done = get(|event| cu!(cuIpcOpenEventHandle(event, handle_of("EVENT"))));
    assert_eq!(
        get(|again| cu!(cuIpcOpenMemHandle_v2(again, handle_of("MEMORY"), 1))),
        at
    );
    let stream = stream();
    hear_first("go");
    // What the first process has recorded.
    ok!(cuStreamWaitEvent(stream, done, 0));
    assert_eq!(launch(increment(), 4, stream, &[at, at]), 0);
    ok!(cuEventRecord(done, stream));
    println!("\ndone");
    hear_first("close");
    ok!(cuStreamSynchronize(stream));
    assert_eq!(cu!(cuMemFree_v2(at)), 1);
    assert_found(FindingKind::HostMisuse);
    ok!(cuIpcCloseMemHandle(at));
    ok!(cuIpcCloseMemHandle(at));
    assert_eq!(cu!(cuIpcCloseMemHandle(at)), 1);
    assert_eq!(report().leaks.imported, 0);
    println!("\nclosed");
    hear_first("end");
}

/// The other process, with memory and an event of this one, and what it hears and says.
struct Other {
    process: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Other {
    fn start(at: u64, event: u64) -> Self {
        let variables = [
            ("MEMORY", to_text(&memory_handle(at))),
            ("EVENT", to_text(&event_handle(event))),
        ];
        let mut process = other_process("processes::adds_one", &variables);
        let (to, from) = (
            process.stdin.take().unwrap(),
            BufReader::new(process.stdout.take().unwrap()),
        );
        Self { process, to, from }
    }

    /// Lets it add 1. It has recorded the event then, and may not be done.
    fn add(&mut self) {
        writeln!(self.to, "go").unwrap();
        hear(&mut self.from, "done");
    }

    fn end(mut self) {
        writeln!(self.to, "close").unwrap();
        hear(&mut self.from, "closed");
        writeln!(self.to, "end").unwrap();
        assert!(self.process.wait().unwrap().success());
    }

    fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

/// Four words to which this process and then the other one add 1, and the event that both have recorded.
fn counted_by_both() -> (u64, u64, Other) {
    let (at, event, stream) = (allocate(16), shared_event(), stream());
    upload(at, &[1, 2, 3, 4]);
    let mut other = Other::start(at, event);
    assert_eq!(launch(increment(), 4, stream, &[at, at]), 0);
    ok!(cuEventRecord(event, stream));
    other.add();
    (at, event, other)
}

#[test]
fn the_host_waits_for_an_event_of_another_process() {
    let _session = session();
    let (at, event, other) = counted_by_both();
    ok!(cuEventSynchronize(event));
    assert_eq!(download(at, 4), [3, 4, 5, 6]);
    other.end();
    ok!(cuMemFree_v2(at));
    assert_clean();
}

#[test]
fn a_stream_waits_for_an_event_of_another_process() {
    let _session = session();
    let (at, event, other) = counted_by_both();
    let stream = stream();
    ok!(cuStreamWaitEvent(stream, event, 0));
    assert_eq!(launch(increment(), 4, stream, &[at, at]), 0);
    ok!(cuStreamSynchronize(stream));
    assert_eq!(download(at, 4), [4, 5, 6, 7]);
    other.end();
    assert_clean();
}

#[test]
fn memory_that_another_process_has_open_must_not_be_freed() {
    let _session = session();
    let (at, event, other) = counted_by_both();
    ok!(cuEventSynchronize(event));
    ok!(cuMemFree_v2(at));
    assert_found(FindingKind::HostMisuse);
    other.kill();
}

#[test]
fn a_process_that_has_died_has_nothing_open() {
    let _session = session();
    let (at, event, other) = counted_by_both();
    ok!(cuEventSynchronize(event));
    other.kill();
    ok!(cuMemFree_v2(at));
    assert_clean();
}

#[test]
fn a_handle_is_not_opened_where_it_was_made() {
    let _session = session();
    let (at, event) = (zeros(16), shared_event());
    let mut place = 0;
    let handle = memory_handle(at);
    assert_eq!(cu!(cuIpcOpenMemHandle_v2((&mut place).into(), handle, 1)), 201);
    assert_eq!(cu!(cuIpcOpenMemHandle_v2((&mut place).into(), handle, 0)), 1);
    assert_eq!(cu!(cuIpcOpenEventHandle((&mut place).into(), event_handle(event))), 201);
    assert_eq!(cu!(cuIpcOpenEventHandle((&mut place).into(), handle)), 400);
}

#[test]
fn only_plain_memory_and_events_without_times_are_shared() {
    let _session = session();
    let ordered = get(|at| cu!(cuMemAllocAsync(at, 16, 0)));
    let plain = zeros(16);
    let mut handle = IpcHandle { reserved: [0; 64] };
    assert_eq!(cu!(cuIpcGetMemHandle((&mut handle).into(), ordered)), 1);
    assert_eq!(cu!(cuIpcGetMemHandle((&mut handle).into(), plain + 8)), 1);
    let mut place = 0;
    assert_eq!(cu!(cuEventCreate((&mut place).into(), INTERPROCESS)), 1);
    let unshared = crate::support::event();
    assert_eq!(cu!(cuIpcGetEventHandle((&mut handle).into(), unshared)), 400);
}
