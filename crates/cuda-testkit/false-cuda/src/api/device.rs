//! Owns the functions on the driver itself, devices and contexts.

use std::ffi::{c_char, c_int, c_uint};

use super::api;
use super::out::Out;
use crate::codes::{Answer, Code};
use crate::context;
use crate::driver;
use crate::settings::Settings;
use crate::state::State;

/// Of each multiprocessor of Hopper (CUDA programming guide, technical specifications by compute capability).
pub(crate) const THREADS_PER_MULTIPROCESSOR: i32 = 2048;
pub(crate) const SHARED_BYTES_PER_MULTIPROCESSOR: i32 = 228 << 10;
pub(crate) const BLOCKS_PER_MULTIPROCESSOR: i32 = 32;
/// What the system takes of a block's shared memory.
pub(crate) const SHARED_BYTES_RESERVED: i32 = 1024;
pub(crate) const THREADS_PER_BLOCK: u32 = 1024;
/// What a block may use without asking for more.
pub(crate) const SHARED_BYTES_DEFAULT: usize = 48 << 10;

/// What a block may ask for, by compute capability (the same table).
pub(crate) fn shared_bytes_max(compute_capability: i32) -> i32 {
    match compute_capability {
        80 | 87 => 163 << 10,
        86 | 89 | 120 | 121 => 99 << 10,
        _ => 227 << 10,
    }
}

/// `CUdevice_attribute`. What is not here is not modelled.
fn attribute(number: c_int, device: usize, settings: &Settings) -> Option<c_int> {
    let cc = settings.compute_capability;
    Some(match number {
        // Limits of a launch.
        1..=3 => THREADS_PER_BLOCK as c_int,
        4 => 64,
        5 => c_int::MAX,
        6 | 7 => 65_535,
        8 => SHARED_BYTES_DEFAULT as c_int,
        9 => 64 << 10,
        10 => 32,
        12 | 82 => 64 << 10,
        // Clocks in kHz, width of memory, L2.
        13 => 1_980_000,
        36 => 3_201_000,
        37 => 6_144,
        38 => 50 << 20,
        16 => 132,
        // Integrated, run-time limit, compute mode, TCC, managed memory, board of several GPUs: no.
        17 | 18 | 20 | 35 | 83 | 84 => 0,
        // Overlap, mapped host memory, concurrent kernels, ECC, unified addresses, priorities, cooperative launch: yes.
        15 | 19 | 31 | 32 | 41 | 78 | 95 => 1,
        33 => pci_bus(device),
        34 | 50 => 0,
        39 => THREADS_PER_MULTIPROCESSOR,
        40 => 3,
        75 => cc / 10,
        76 => cc % 10,
        81 => SHARED_BYTES_PER_MULTIPROCESSOR,
        97 => shared_bytes_max(cc),
        // Registration of host memory, memory pools (for `cuMemAllocAsync`), events between processes: yes.
        99 | 115 | 125 => 1,
        106 => BLOCKS_PER_MULTIPROCESSOR,
        111 => SHARED_BYTES_RESERVED,
        // Virtual memory, handles by descriptor and by fabric, multicast, GPUDirect: not modelled, so not supported.
        102 | 103 | 110 | 116 | 124 | 128 | 132 => 0,
        _ => return None,
    })
}

fn pci_bus(device: usize) -> c_int {
    0x1b + device as c_int
}

fn known_device(state: &State, device: c_int) -> Result<usize, Code> {
    let device = usize::try_from(device).map_err(|_| Code::INVALID_DEVICE)?;
    if device < state.devices.len() {
        Ok(device)
    } else {
        Err(Code::INVALID_DEVICE)
    }
}

fn settings(state: &State) -> Result<&Settings, Code> {
    state.settings.as_ref().map_err(|_| Code::SYSTEM_NOT_READY)
}

fn known_context(state: &State, handle: u64) -> Result<usize, Code> {
    let device = context::device_of(handle).filter(|device| *device < state.devices.len());
    device
        .filter(|device| state.devices[*device].retained > 0)
        .ok_or(Code::INVALID_CONTEXT)
}

fn initialise(state: &mut State, flags: c_uint) -> Answer {
    if let Err(error) = &state.settings {
        eprintln!("false cuda: {error}");
        return Err(Code::SYSTEM_NOT_READY);
    }
    if flags != 0 {
        return Err(Code::INVALID_VALUE);
    }
    if state.devices.is_empty() {
        return Err(Code::NO_DEVICE);
    }
    driver::start()?;
    state.is_initialised = true;
    Ok(())
}

/// The same for a device in every process, as two processes find by it that they have one device.
fn uuid(device: usize) -> [u8; 16] {
    let mut bytes = *b"false-cuda-uuid0";
    bytes[15] += device as u8;
    bytes
}

api! {
fn cuInit(Nothing, driver, flags: c_uint) {
    initialise(driver, flags)
}

fn cuDriverGetVersion(Nothing, driver, version: Out<'_, c_int>) {
    version.set(settings(driver)?.version)
}

fn cuDeviceGetCount(Initialised, driver, count: Out<'_, c_int>) {
    count.set(driver.devices.len() as c_int)
}

fn cuDeviceGet(Initialised, driver, device: Out<'_, c_int>, ordinal: c_int) {
    known_device(driver, ordinal)?;
    device.set(ordinal)
}

fn cuDeviceGetName(Initialised, driver, name: Out<'_, c_char>, length: c_int, device: c_int) {
    known_device(driver, device)?;
    name.set_text(&settings(driver)?.name, length)
}

fn cuDeviceGetAttribute(Initialised, driver, value: Out<'_, c_int>, number: c_int, device: c_int) {
    let device = known_device(driver, device)?;
    match attribute(number, device, settings(driver)?) {
        Some(known) => value.set(known),
        None => {
            driver.misuse(format!("attribute {number} of a device is not modelled"));
            Err(Code::INVALID_VALUE)
        }
    }
}

fn cuDeviceGetUuid(Initialised, driver, bytes: Out<'_, [u8; 16]>, device: c_int) {
    bytes.set(uuid(known_device(driver, device)?))
}

fn cuDeviceGetUuid_v2(Initialised, driver, bytes: Out<'_, [u8; 16]>, device: c_int) {
    bytes.set(uuid(known_device(driver, device)?))
}

fn cuDeviceTotalMem_v2(Initialised, driver, bytes: Out<'_, usize>, device: c_int) {
    known_device(driver, device)?;
    bytes.set(settings(driver)?.memory_bytes)
}

fn cuDeviceGetPCIBusId(Initialised, driver, name: Out<'_, c_char>, length: c_int, device: c_int) {
    let bus = pci_bus(known_device(driver, device)?);
    name.set_text(&format!("0000:{bus:02X}:00.0"), length)
}

fn cuDeviceCanAccessPeer(Initialised, driver, can: Out<'_, c_int>, device: c_int, peer: c_int) {
    known_device(driver, device)?;
    known_device(driver, peer)?;
    can.set(0)
}

fn cuDevicePrimaryCtxRetain(Initialised, driver, handle: Out<'_, u64>, device: c_int) {
    let device = known_device(driver, device)?;
    driver.devices[device].retained += 1;
    handle.set(context::handle_of(device))
}

fn cuDevicePrimaryCtxRelease_v2(Initialised, driver, device: c_int) {
    let device = known_device(driver, device)?;
    let retained = driver.devices[device].retained;
    driver.devices[device].retained = retained.checked_sub(1).ok_or(Code::INVALID_CONTEXT)?;
    Ok(())
}

fn cuDevicePrimaryCtxGetState(Initialised, driver, device: c_int, flags: Out<'_, c_uint>, active: Out<'_, c_int>) {
    let device = known_device(driver, device)?;
    flags.set(0)?;
    active.set(c_int::from(driver.devices[device].retained > 0))
}

fn cuCtxGetCurrent(Initialised, _driver, handle: Out<'_, u64>) {
    handle.set(context::current().map_or(0, context::handle_of))
}

fn cuCtxSetCurrent(Initialised, driver, handle: u64) {
    let device = if handle == 0 { None } else { Some(known_context(driver, handle)?) };
    context::set_current(device);
    Ok(())
}

fn cuCtxPushCurrent_v2(Initialised, driver, handle: u64) {
    context::push(known_context(driver, handle)?);
    Ok(())
}

fn cuCtxPopCurrent_v2(Initialised, _driver, handle: Out<'_, u64>) {
    let device = context::pop().ok_or(Code::INVALID_CONTEXT)?;
    handle.set_if_given(context::handle_of(device));
    Ok(())
}

fn cuCtxGetDevice(Initialised, driver, device: Out<'_, c_int>) {
    device.set(driver.current_device()? as c_int)
}

fn cuCtxGetStreamPriorityRange(Context, _driver, least: Out<'_, c_int>, greatest: Out<'_, c_int>) {
    least.set_if_given(0);
    greatest.set_if_given(-5);
    Ok(())
}

fn cuCtxSynchronize(Context, driver) {
    driver.refuse_in_any_capture()?;
    let device = driver.current_device()?;
    driver.wait_for_device(device)
}
}
