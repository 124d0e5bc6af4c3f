//! Owns the functions that share memory and events between processes.
//!
//! Modelled: a handle of plain memory only, at its start; not in the process that exported it; closed as often as it was opened; an
//! event needs CU_EVENT_INTERPROCESS and CU_EVENT_DISABLE_TIMING; the owner must not free memory that others have open. Not
//! modelled: races between processes (each sees only its own accesses), peers.
//! A handle of an owner that has died is refused. Memory that was opened before stays readable, as its file does.

use std::ffi::c_uint;
use std::sync::Arc;

use super::api;
use super::out::Out;
use crate::codes::Code;
use crate::objects::{Event, Origin, Recorded};
use crate::shared_page::{HandleFields, HandleKind, IpcHandle};

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, the only flag that NVIDIA's function takes.
const LAZY_PEER_ACCESS: c_uint = 1;

/// The fields of a handle that another process made.
fn foreign(handle: &IpcHandle, kind: HandleKind) -> Result<HandleFields, Code> {
    let fields = HandleFields::unpack(handle, kind).ok_or(Code::INVALID_HANDLE)?;
    if fields.process == std::process::id() {
        Err(Code::INVALID_CONTEXT)
    } else {
        Ok(fields)
    }
}

api! {
fn cuIpcGetMemHandle(Context, driver, handle: Out<'_, IpcHandle>, at: u64) {
    let page = driver.export(at)?;
    let memory = driver.allocations.get(&at).ok_or(Code::INVALID_VALUE)?;
    let fields = HandleFields::new(&page, Some((&memory.file, memory.bytes)));
    handle.set(fields.pack(HandleKind::Memory))
}

fn cuIpcOpenMemHandle_v2(Context, driver, at: Out<'_, u64>, handle: IpcHandle, flags: c_uint) {
    if flags != LAZY_PEER_ACCESS {
        return Err(Code::INVALID_VALUE);
    }
    at.set(driver.import(&foreign(&handle, HandleKind::Memory)?)?)
}

/// Waits for the device.
fn cuIpcCloseMemHandle(Context, driver, at: u64) {
    let memory = driver.allocations.get_mut(&at).ok_or(Code::INVALID_VALUE)?;
    let Origin::Imported { times, .. } = &mut memory.origin else { return Err(Code::INVALID_VALUE) };
    if *times > 1 {
        *times -= 1;
        return Ok(());
    }
    let device = memory.device;
    driver.wait_for_device(device)?;
    driver.release(at);
    Ok(())
}

fn cuIpcGetEventHandle(Context, driver, handle: Out<'_, IpcHandle>, event: u64) {
    let event = driver.events.get(&event).ok_or(Code::INVALID_HANDLE)?;
    let page = event.page.as_ref().ok_or(Code::INVALID_HANDLE)?;
    handle.set(HandleFields::new(page, None).pack(HandleKind::Event))
}

fn cuIpcOpenEventHandle(Context, driver, event: Out<'_, u64>, handle: IpcHandle) {
    let page = foreign(&handle, HandleKind::Event)?.open_page().map_err(|_| Code::INVALID_HANDLE)?;
    let device = driver.current_device()?;
    let new = driver.new_handle();
    let page = Some(Arc::new(page));
    driver.events.insert(new, Event { device, has_timing: false, recorded: Recorded::Never, finished: None, page });
    event.set(new)
}
}
