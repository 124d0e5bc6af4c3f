//! Owns the functions that capture streams and run graphs. `capture.rs` has the rules. A graph cannot be changed or looked into here.

use std::ffi::{c_int, c_uint, c_ulonglong};

use super::api;
use super::out::Out;
use crate::codes::Code;
use crate::objects::{CaptureMode, CaptureState};

/// `CUstreamCaptureStatus`.
const NOT_CAPTURED: c_int = 0;
const ACTIVE: c_int = 1;
const INVALIDATED: c_int = 2;

/// `CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH` and `_UPLOAD`, which change nothing without allocations in graphs.
const HARMLESS_FLAGS: c_ulonglong = 0b11;

api! {
fn cuStreamBeginCapture_v2(Context, driver, stream: u64, mode: c_uint) {
    let mode = match mode {
        0 => CaptureMode::Global,
        1 => CaptureMode::ThreadLocal,
        2 => CaptureMode::Relaxed,
        _ => return Err(Code::INVALID_VALUE),
    };
    let stream = driver.stream(stream)?;
    driver.begin_capture(stream, mode)
}

/// The graph is NULL after an error.
fn cuStreamEndCapture(Context, driver, stream: u64, graph: Out<'_, u64>) {
    let stream = driver.stream(stream)?;
    match driver.end_capture(stream) {
        Ok(captured) => {
            let handle = driver.new_handle();
            driver.graphs.insert(handle, captured);
            graph.set(handle)
        }
        Err(code) => {
            graph.set(0)?;
            Err(code)
        }
    }
}

fn cuStreamIsCapturing(Context, driver, stream: u64, status: Out<'_, c_int>) {
    let stream = driver.stream(stream)?;
    let capture = driver.streams[stream].capture.and_then(|id| driver.captures.get(&id));
    status.set(match capture.map(|capture| capture.state) {
        None => NOT_CAPTURED,
        Some(CaptureState::Active) => ACTIVE,
        Some(CaptureState::Invalidated) => INVALIDATED,
    })
}

fn cuGraphInstantiateWithFlags(Context, driver, executable: Out<'_, u64>, graph: u64, flags: c_ulonglong) {
    if flags & !HARMLESS_FLAGS != 0 {
        return Err(Code::NOT_SUPPORTED);
    }
    let graph = driver.graphs.get(&graph).cloned().ok_or(Code::INVALID_HANDLE)?;
    let made = driver.instantiate(graph);
    let handle = driver.new_handle();
    driver.executables.insert(handle, made);
    executable.set(handle)
}

fn cuGraphLaunch(Context, driver, executable: u64, stream: u64) {
    let stream = driver.stream(stream)?;
    driver.launch_graph(executable, stream)
}

/// Does nothing: there is nothing to upload.
fn cuGraphUpload(Context, driver, executable: u64, stream: u64) {
    let stream = driver.stream(stream)?;
    driver.refuse_captured(stream)?;
    if driver.executables.contains_key(&executable) { Ok(()) } else { Err(Code::INVALID_HANDLE) }
}

/// Launches that are under way go on.
fn cuGraphExecDestroy(Context, driver, executable: u64) {
    driver.executables.remove(&executable).map(|_| ()).ok_or(Code::INVALID_HANDLE)
}

fn cuGraphDestroy(Context, driver, graph: u64) {
    driver.graphs.remove(&graph).map(|_| ()).ok_or(Code::INVALID_HANDLE)
}
}
