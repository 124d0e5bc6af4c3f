//! Owns the functions on streams, but for their capture.

use std::ffi::{c_int, c_uint, c_void};

use super::api;
use super::events::{Goal, goal_of};
use super::out::Out;
use crate::codes::{Answer, Code};
use crate::order::Mark;
use crate::state::State;
use crate::work::{HostFunction, Work};

const NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_WAIT_EXTERNAL`.
const WAIT_EXTERNAL: c_uint = 1;

fn create(state: &mut State, handle: Out<'_, u64>, flags: c_uint) -> Answer {
    if flags & !NON_BLOCKING != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let device = state.current_device()?;
    let stream = state.new_stream(device, flags & NON_BLOCKING == 0);
    let new = state.new_handle();
    state.stream_handles.insert(new, stream);
    handle.set(new)
}

/// What a wait for a stream waits for: the legacy stream stands for the blocking streams too.
fn marks_of(state: &State, stream: usize) -> Vec<Mark> {
    let is_legacy = stream == state.devices[state.streams[stream].device].default_stream;
    let mut marks = if is_legacy {
        state.legacy_order(stream)
    } else {
        Vec::new()
    };
    marks.push(state.streams[stream].last.clone());
    marks
}

fn refuse(state: &mut State, stream: usize) -> Answer {
    state.refuse_captured(stream)?;
    state.refuse_implicit_capture(stream)?;
    state.refuse_in_capture()
}

fn wait_for_event(state: &mut State, stream: usize, event: u64) -> Answer {
    let goal = goal_of(state, event)?;
    if let Goal::Captured { capture, tips } = &goal {
        return state.join_capture(stream, *capture, tips);
    }
    if let Some(capture) = state.streams[stream].capture {
        state.invalidate_capture(capture);
        return Err(Code::STREAM_CAPTURE_ISOLATION);
    }
    match goal {
        Goal::Never | Goal::Captured { .. } => Ok(()),
        Goal::Here(mark) => state.submit_after(stream, Work::Nothing, vec![mark]),
        Goal::Elsewhere { page, ticket } => state.submit(stream, Work::AwaitProcess { page, ticket }),
    }
}

api! {
fn cuStreamCreate(Context, driver, handle: Out<'_, u64>, flags: c_uint) {
    create(driver, handle, flags)
}

/// Priorities change nothing here.
fn cuStreamCreateWithPriority(Context, driver, handle: Out<'_, u64>, flags: c_uint, _priority: c_int) {
    create(driver, handle, flags)
}

/// Work that the stream has is done all the same.
fn cuStreamDestroy_v2(Context, driver, handle: u64) {
    let stream = driver.stream_handles.remove(&handle).ok_or(Code::INVALID_HANDLE)?;
    if let Some(capture) = driver.streams[stream].capture {
        driver.drop_capture(capture);
    }
    Ok(())
}

fn cuStreamSynchronize(Context, driver, handle: u64) {
    let stream = driver.stream(handle)?;
    refuse(driver, stream)?;
    let (marks, device) = (marks_of(driver, stream), driver.streams[stream].device);
    driver.wait(&marks)?;
    driver.device_answer(device)
}

fn cuStreamQuery(Context, driver, handle: u64) {
    let stream = driver.stream(handle)?;
    refuse(driver, stream)?;
    let (marks, device) = (marks_of(driver, stream), driver.streams[stream].device);
    driver.run_some();
    driver.device_answer(device)?;
    if !marks.iter().all(|mark| driver.is_done(mark.point)) {
        return Err(Code::NOT_READY);
    }
    marks.iter().for_each(|mark| driver.learn(&mark.clock));
    Ok(())
}

fn cuStreamWaitEvent(Context, driver, handle: u64, event: u64, flags: c_uint) {
    let stream = driver.stream(handle)?;
    match flags {
        0 => wait_for_event(driver, stream, event),
        WAIT_EXTERNAL => Err(Code::NOT_SUPPORTED),
        _ => Err(Code::INVALID_VALUE),
    }
}

/// The function runs on a thread that is in a call, so it cannot call the driver: that is answered with NOT_PERMITTED.
fn cuLaunchHostFunc(Context, driver, handle: u64, function: Option<HostFunction>, data: *mut c_void) {
    let stream = driver.stream(handle)?;
    let function = function.ok_or(Code::INVALID_VALUE)?;
    driver.submit(stream, Work::HostFunction { function, data: data as u64 })
}
}
