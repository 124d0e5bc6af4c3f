//! Owns the functions that allocate and free memory of devices and pinned memory of the host.

use std::ffi::{c_int, c_uint, c_void};

use super::api;
use super::out::Out;
use crate::codes::{Answer, Code};
use crate::context;
use crate::objects::{Origin, PinnedBy};
use crate::state::State;

/// All flags of `cuMemHostAlloc` and `cuMemHostRegister`: they change where memory is mapped, not what a copy does.
const HOST_FLAGS: c_uint = 0b1111;
const MEMORY_TYPE_HOST: u64 = 1;
const MEMORY_TYPE_DEVICE: u64 = 2;

/// The device of memory that may be freed by this call.
fn freeable(state: &mut State, at: u64) -> Result<usize, Code> {
    let what = match state.allocations.get(&at) {
        Some(memory) if !matches!(memory.origin, Origin::Imported { .. }) => return Ok(memory.device),
        Some(_) => "imported memory is closed by cuIpcCloseMemHandle, not freed",
        None => "an address is freed at which no memory begins",
    };
    state.misuse(what);
    Err(Code::INVALID_VALUE)
}

/// A value of `CUpointer_attribute` for device memory or pinned memory, and whether it has 8 bytes.
fn pointer_attribute(state: &State, number: c_int, at: u64) -> Option<(u64, bool)> {
    let device = state
        .allocation_of(at, 1)
        .map(|(start, memory)| (start, memory.bytes, memory.device));
    let pinned = || {
        let (start, pinned) = state.pinned.range(..=at).next_back()?;
        state
            .is_pinned(at, 1)
            .then_some((*start, pinned.bytes, context::current().unwrap_or(0)))
    };
    let memory_type = if device.is_some() {
        MEMORY_TYPE_DEVICE
    } else {
        MEMORY_TYPE_HOST
    };
    let (start, bytes, ordinal) = device.or_else(pinned)?;
    match number {
        1 => Some((context::handle_of(ordinal), true)),
        2 => Some((memory_type, false)),
        9 => Some((ordinal as u64, false)),
        11 => Some((start, true)),
        12 => Some((bytes as u64, true)),
        _ => None,
    }
}

fn answer_pointer(state: &State, number: c_int, at: u64, data: *mut c_void) -> Answer {
    let (value, is_long) = pointer_attribute(state, number, at).ok_or(Code::INVALID_VALUE)?;
    if data.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: the caller gives a place of the attribute's type: 8 bytes for addresses, sizes and handles, else 4.
    unsafe {
        if is_long {
            data.cast::<u64>().write(value)
        } else {
            data.cast::<u32>().write(value as u32)
        }
    };
    Ok(())
}

api! {
fn cuMemGetInfo_v2(Context, driver, free: Out<'_, usize>, total: Out<'_, usize>) {
    let memory_bytes = driver.settings.as_ref().map_or(0, |settings| settings.memory_bytes);
    let device = driver.current_device()?;
    free.set(memory_bytes - driver.devices[device].used_bytes)?;
    total.set(memory_bytes)
}

fn cuMemAlloc_v2(Context, driver, at: Out<'_, u64>, bytes: usize) {
    driver.refuse_in_capture()?;
    at.set(driver.allocate(bytes, Origin::Plain { page: None })?)
}

/// The memory can be used by other streams at once: that they have to be ordered behind it is not modelled.
fn cuMemAllocAsync(Context, driver, at: Out<'_, u64>, bytes: usize, stream: u64) {
    let stream = driver.stream(stream)?;
    driver.refuse_captured(stream)?;
    at.set(driver.allocate(bytes, Origin::Ordered)?)
}

/// Waits for the device, as the real one does for memory that may be in use.
fn cuMemFree_v2(Context, driver, at: u64) {
    driver.refuse_in_capture()?;
    let device = freeable(driver, at)?;
    driver.wait_for_device(device)?;
    driver.release(at);
    Ok(())
}

fn cuMemFreeAsync(Context, driver, at: u64, stream: u64) {
    freeable(driver, at)?;
    let stream = driver.stream(stream)?;
    driver.submit(stream, crate::work::Work::Free(at))
}

fn cuMemHostAlloc(Context, driver, at: Out<'_, *mut c_void>, bytes: usize, flags: c_uint) {
    driver.refuse_in_capture()?;
    if flags & !HOST_FLAGS != 0 {
        return Err(Code::INVALID_VALUE);
    }
    at.set(driver.pin_new(bytes)? as *mut c_void)
}

/// Waits for the device.
fn cuMemFreeHost(Context, driver, at: *mut c_void) {
    driver.refuse_in_capture()?;
    let device = driver.current_device()?;
    driver.wait_for_device(device)?;
    driver.unpin(at as u64, PinnedBy::Allocated)
}

fn cuMemHostRegister_v2(Context, driver, at: *mut c_void, bytes: usize, flags: c_uint) {
    driver.refuse_in_capture()?;
    if flags & !HOST_FLAGS != 0 {
        return Err(Code::INVALID_VALUE);
    }
    driver.pin_existing(at as u64, bytes)
}

/// Waits for the device.
fn cuMemHostUnregister(Context, driver, at: *mut c_void) {
    driver.refuse_in_capture()?;
    let device = driver.current_device()?;
    driver.wait_for_device(device)?;
    driver.unpin(at as u64, PinnedBy::Registered)
}

fn cuPointerGetAttribute(Context, driver, data: *mut c_void, number: c_int, at: u64) {
    answer_pointer(driver, number, at, data)
}
}
