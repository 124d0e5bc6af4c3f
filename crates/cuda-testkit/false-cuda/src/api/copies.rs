//! Owns the functions that copy and fill memory.
//!
//! From NVIDIA's "API synchronization behavior": a copy from pageable memory has read it when the call returns; a copy to pageable
//! memory is over then; copies of pinned memory and fills are not waited for.

use std::ffi::{c_uchar, c_uint, c_ushort, c_void};
use std::sync::Arc;

use super::api;
use crate::codes::{Answer, Code};
use crate::driver::Driver;
use crate::state::State;
use crate::work::{Copy, Fill, Side, Work};

fn check_host(state: &mut State, at: u64) -> Answer {
    if at == 0 {
        return Err(Code::INVALID_VALUE);
    }
    if state.space.has(at) {
        state.misuse(format!("the device address {at:#x} is given as one of the host"));
        return Err(Code::INVALID_VALUE);
    }
    Ok(())
}

fn to_device(driver: &mut Driver, to: u64, from: *const c_void, bytes: usize, stream: usize) -> Answer {
    if bytes == 0 {
        return Ok(());
    }
    let at = from as u64;
    driver.check_range(to, bytes)?;
    check_host(driver, at)?;
    let stays = driver.is_pinned(at, bytes) || driver.streams[stream].capture.is_some();
    let from = if stays {
        Side::Host(at)
    } else {
        // SAFETY: the caller gives so many bytes to read.
        Side::Staged(Arc::from(unsafe {
            std::slice::from_raw_parts(from.cast::<u8>(), bytes)
        }))
    };
    driver.submit(
        stream,
        Work::Copy(Copy {
            to: Side::Device(to),
            from,
            bytes,
        }),
    )
}

fn to_host(driver: &mut Driver, to: *mut c_void, from: u64, bytes: usize, stream: usize) -> Answer {
    if bytes == 0 {
        return Ok(());
    }
    driver.check_range(from, bytes)?;
    check_host(driver, to as u64)?;
    driver.submit(
        stream,
        Work::Copy(Copy {
            to: Side::Host(to as u64),
            from: Side::Device(from),
            bytes,
        }),
    )?;
    let is_over = driver.is_pinned(to as u64, bytes) || driver.streams[stream].capture.is_some();
    if is_over { Ok(()) } else { wait_for_last(driver, stream) }
}

fn on_device(driver: &mut Driver, to: u64, from: u64, bytes: usize, stream: usize) -> Answer {
    if bytes == 0 {
        return Ok(());
    }
    driver.check_range(to, bytes)?;
    driver.check_range(from, bytes)?;
    driver.submit(
        stream,
        Work::Copy(Copy {
            to: Side::Device(to),
            from: Side::Device(from),
            bytes,
        }),
    )
}

fn fill(driver: &mut Driver, fill: Fill, stream: usize) -> Answer {
    if fill.count == 0 {
        return Ok(());
    }
    if !fill.at.is_multiple_of(fill.width as u64) {
        return Err(Code::INVALID_VALUE);
    }
    let bytes = fill.count.checked_mul(fill.width).ok_or(Code::INVALID_VALUE)?;
    driver.check_range(fill.at, bytes)?;
    driver.submit(stream, Work::Fill(fill))
}

/// The legacy stream, for a call that waits: such calls are not permitted during a capture.
fn legacy(driver: &mut Driver) -> Result<usize, Code> {
    let stream = driver.stream(0)?;
    driver.refuse_implicit_capture(stream)?;
    driver.refuse_in_capture()?;
    Ok(stream)
}

fn wait_for_last(driver: &mut Driver, stream: usize) -> Answer {
    let (last, device) = (driver.streams[stream].last.clone(), driver.streams[stream].device);
    driver.wait(&[last])?;
    driver.device_answer(device)
}

api! {
fn cuMemcpyHtoD_v2(Context, driver, to: u64, from: *const c_void, bytes: usize) {
    let stream = legacy(driver)?;
    to_device(driver, to, from, bytes, stream)?;
    wait_for_last(driver, stream)
}

fn cuMemcpyDtoH_v2(Context, driver, to: *mut c_void, from: u64, bytes: usize) {
    let stream = legacy(driver)?;
    to_host(driver, to, from, bytes, stream)?;
    wait_for_last(driver, stream)
}

/// Not waited for.
fn cuMemcpyDtoD_v2(Context, driver, to: u64, from: u64, bytes: usize) {
    let stream = legacy(driver)?;
    on_device(driver, to, from, bytes, stream)
}

fn cuMemcpyHtoDAsync_v2(Context, driver, to: u64, from: *const c_void, bytes: usize, stream: u64) {
    let stream = driver.stream(stream)?;
    to_device(driver, to, from, bytes, stream)
}

fn cuMemcpyDtoHAsync_v2(Context, driver, to: *mut c_void, from: u64, bytes: usize, stream: u64) {
    let stream = driver.stream(stream)?;
    to_host(driver, to, from, bytes, stream)
}

fn cuMemcpyDtoDAsync_v2(Context, driver, to: u64, from: u64, bytes: usize, stream: u64) {
    let stream = driver.stream(stream)?;
    on_device(driver, to, from, bytes, stream)
}

/// Not waited for.
fn cuMemsetD8_v2(Context, driver, at: u64, value: c_uchar, count: usize) {
    let stream = legacy(driver)?;
    fill(driver, Fill { at, value: value.into(), width: 1, count }, stream)
}

fn cuMemsetD8Async(Context, driver, at: u64, value: c_uchar, count: usize, stream: u64) {
    let stream = driver.stream(stream)?;
    fill(driver, Fill { at, value: value.into(), width: 1, count }, stream)
}

fn cuMemsetD16Async(Context, driver, at: u64, value: c_ushort, count: usize, stream: u64) {
    let stream = driver.stream(stream)?;
    fill(driver, Fill { at, value: value.into(), width: 2, count }, stream)
}

fn cuMemsetD32Async(Context, driver, at: u64, value: c_uint, count: usize, stream: u64) {
    let stream = driver.stream(stream)?;
    fill(driver, Fill { at, value, width: 4, count }, stream)
}
}
