//! Owns the functions on modules and kernels.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use ptx_vm::{FindingKind, Module};

use super::api;
use super::device::{
    BLOCKS_PER_MULTIPROCESSOR, SHARED_BYTES_DEFAULT, SHARED_BYTES_PER_MULTIPROCESSOR, SHARED_BYTES_RESERVED,
    THREADS_PER_BLOCK, THREADS_PER_MULTIPROCESSOR, shared_bytes_max,
};
use super::out::Out;
use crate::codes::{Answer, Code};
use crate::objects::{Function, LoadedModule};
use crate::state::State;
use crate::work::{KernelLaunch, Work};

/// How a cubin and a fatbin begin.
const ELF: [u8; 4] = *b"\x7fELF";
const FATBIN: [u8; 4] = 0xba55_ed50_u32.to_le_bytes();

/// `CUfunction_attribute`.
const MAX_DYNAMIC_SHARED_BYTES: c_int = 8;
const SHARED_CARVEOUT: c_int = 9;

/// `CUjit_option`.
const JIT_ERROR_LOG: c_int = 5;
const JIT_ERROR_LOG_BYTES: c_int = 6;

/// What a kernel takes of a multiprocessor is known to `ptxas` alone. This stands for it where a number has to be answered.
const REGISTERS_ASSUMED: c_int = 32;

/// The newest PTX that a driver takes: PTX 8.x belongs to CUDA 12, 9.x to 13 (release notes of the PTX ISA).
fn ptx_version_max(driver: i32) -> (u32, u32) {
    match driver {
        13_000.. => (9, (driver % 1000 / 10).unsigned_abs()),
        12_090.. => (8, 8),
        12_080.. => (8, 7),
        12_070.. => (8, 6),
        12_050.. => (8, 5),
        12_000.. => (8, (driver % 1000 / 10).unsigned_abs()),
        _ => (7, 8),
    }
}

/// Whether code for `sm_` with this name runs on a device: `a` is for one chip, `f` for its family, else also for later ones.
fn runs_on(target: &str, compute_capability: i32) -> Option<bool> {
    let name = target.strip_prefix("sm_")?;
    let digits = name.trim_end_matches(|c: char| c.is_ascii_lowercase());
    let made_for: i32 = digits.parse().ok()?;
    Some(match &name[digits.len()..] {
        "" => made_for <= compute_capability,
        "a" => made_for == compute_capability,
        "f" => made_for / 10 == compute_capability / 10 && made_for <= compute_capability,
        _ => return None,
    })
}

/// What a driver looks at before it compiles.
fn check_head(ptx: &str, version: i32, compute_capability: i32) -> Answer {
    let directive = |name: &str| {
        ptx.lines()
            .find_map(|line| line.trim().strip_prefix(name))
            .map(str::trim)
    };
    let numbers = directive(".version").and_then(|text| text.split_once('.'));
    let numbers = numbers.and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    if numbers.ok_or(Code::INVALID_PTX)? > ptx_version_max(version) {
        return Err(Code::UNSUPPORTED_PTX_VERSION);
    }
    let target = directive(".target").and_then(|text| text.split(',').next());
    match target.and_then(|target| runs_on(target.trim(), compute_capability)) {
        Some(true) => Ok(()),
        Some(false) => Err(Code::NO_BINARY_FOR_GPU),
        None => Err(Code::INVALID_PTX),
    }
}

/// Why an image is refused: the code, and what the compiler would say.
struct Refused(Code, String);

impl From<Code> for Refused {
    fn from(code: Code) -> Self {
        Self(code, String::new())
    }
}

fn load(state: &mut State, image: *const c_void) -> Result<u64, Refused> {
    state.refuse_in_capture()?;
    if image.is_null() {
        return Err(Code::INVALID_VALUE.into());
    }
    let settings = state.settings.as_ref().map_err(|_| Code::SYSTEM_NOT_READY)?;
    // SAFETY: an image is an ELF file, a fatbin or text with a NUL. The first two have more than four bytes, and the third ends.
    let text = unsafe { CStr::from_ptr(image.cast()) };
    if [ELF, FATBIN].iter().any(|magic| text.to_bytes().starts_with(magic)) {
        return Err(Code::NO_BINARY_FOR_GPU.into());
    }
    let text = text.to_str().map_err(|_| Code::INVALID_IMAGE)?;
    check_head(text, settings.version, settings.compute_capability)?;
    let device = state.current_device()?;
    let module = Module::parse(text).map_err(|error| {
        state.findings.set_kernel(state.call);
        state.findings.add(FindingKind::BadModule, 0, 0, || error.to_string());
        Refused(Code::INVALID_PTX, error.to_string())
    })?;
    let new = state.new_handle();
    let functions = BTreeMap::new();
    state.modules.insert(
        new,
        LoadedModule {
            device,
            module,
            functions,
        },
    );
    Ok(new)
}

/// Writes what the compiler says to the buffer that the options name, with a NUL. Other options have no effect.
///
/// # Safety
/// There are `count` options and values, and the buffer has as many bytes as its option says.
unsafe fn write_log(said: &str, count: c_uint, options: *const c_int, values: *const *mut c_void) {
    if count == 0 || options.is_null() || values.is_null() {
        return;
    }
    // SAFETY: the caller of this function promises it.
    let (options, values) = unsafe {
        let count = count as usize;
        (
            std::slice::from_raw_parts(options, count),
            std::slice::from_raw_parts(values, count),
        )
    };
    let value = |wanted| options.iter().position(|option| *option == wanted).map(|at| values[at]);
    let (Some(buffer), Some(bytes)) = (value(JIT_ERROR_LOG), value(JIT_ERROR_LOG_BYTES)) else {
        return;
    };
    // The size is given in the place of a pointer.
    let Some(room) = (bytes as usize).checked_sub(1).filter(|_| !buffer.is_null()) else {
        return;
    };
    let said = &said.as_bytes()[..said.len().min(room)];
    // SAFETY: as above, and the text with its NUL is no longer than the buffer.
    unsafe {
        std::ptr::copy_nonoverlapping(said.as_ptr(), buffer.cast::<u8>(), said.len());
        buffer.cast::<u8>().add(said.len()).write(0);
    }
}

fn function_of(state: &mut State, module: u64, name: &str) -> Result<u64, Code> {
    let new = state.new_handle();
    let loaded = state.modules.get_mut(&module).ok_or(Code::INVALID_HANDLE)?;
    if let Some(known) = loaded.functions.get(name) {
        return Ok(*known);
    }
    let kernel = loaded.module.kernel(name).ok_or(Code::NOT_FOUND)?;
    loaded.functions.insert(name.to_owned(), new);
    let dynamic_shared_bytes_max = SHARED_BYTES_DEFAULT.saturating_sub(kernel.static_shared_bytes);
    let function = Function {
        module,
        device: loaded.device,
        kernel,
        dynamic_shared_bytes_max,
    };
    state.functions.insert(new, function);
    Ok(new)
}

fn known_function(state: &State, function: u64) -> Result<&Function, Code> {
    state.functions.get(&function).ok_or(Code::INVALID_HANDLE)
}

fn attribute(function: &Function, number: c_int, compute_capability: i32) -> Option<c_int> {
    let kernel = &function.kernel;
    let bytes = |bytes: usize| c_int::try_from(bytes).ok();
    match number {
        0 => Some(kernel.max_threads.unwrap_or(THREADS_PER_BLOCK) as c_int),
        1 => bytes(kernel.static_shared_bytes),
        // Constants of the user, cache mode, carve-out: none.
        2 | 7 => Some(0),
        3 => bytes(kernel.local_bytes),
        4 => Some(REGISTERS_ASSUMED),
        5 | 6 => Some(compute_capability),
        MAX_DYNAMIC_SHARED_BYTES => bytes(function.dynamic_shared_bytes_max),
        SHARED_CARVEOUT => Some(-1),
        _ => None,
    }
}

fn set_attribute(state: &mut State, function: u64, number: c_int, value: c_int) -> Answer {
    let cc = state
        .settings
        .as_ref()
        .map_or(0, |settings| settings.compute_capability);
    let function = state.functions.get_mut(&function).ok_or(Code::INVALID_HANDLE)?;
    match number {
        MAX_DYNAMIC_SHARED_BYTES => {
            let bytes = usize::try_from(value).map_err(|_| Code::INVALID_VALUE)?;
            if bytes + function.kernel.static_shared_bytes > shared_bytes_max(cc) as usize {
                return Err(Code::INVALID_VALUE);
            }
            function.dynamic_shared_bytes_max = bytes;
            Ok(())
        }
        // A hint.
        SHARED_CARVEOUT if (-1..=100).contains(&value) => Ok(()),
        _ => Err(Code::INVALID_VALUE),
    }
}

/// How many blocks of a kernel fit a multiprocessor. Registers are assumed, so a real device may answer less.
fn occupancy(function: &Function, threads: c_int, dynamic_shared_bytes: usize) -> Result<c_int, Code> {
    let threads = u32::try_from(threads)
        .ok()
        .filter(|threads| *threads > 0)
        .ok_or(Code::INVALID_VALUE)?;
    let threads_max = function.kernel.max_threads.unwrap_or(THREADS_PER_BLOCK);
    if threads > threads_max || dynamic_shared_bytes > function.dynamic_shared_bytes_max {
        return Ok(0);
    }
    let warps = threads.div_ceil(32) as c_int;
    let shared_bytes = (function.kernel.static_shared_bytes + dynamic_shared_bytes) as c_int + SHARED_BYTES_RESERVED;
    let by_threads = THREADS_PER_MULTIPROCESSOR / (warps * 32);
    Ok(by_threads
        .min(SHARED_BYTES_PER_MULTIPROCESSOR / shared_bytes)
        .min(BLOCKS_PER_MULTIPROCESSOR))
}

/// `CUlaunchConfig`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LaunchConfig {
    pub grid: [c_uint; 3],
    pub block: [c_uint; 3],
    pub shared_bytes: c_uint,
    pub stream: u64,
    pub attributes: *const c_void,
    pub attribute_count: c_uint,
}

/// The arguments of a launch, as the two functions get them.
struct Arguments {
    values: *mut *mut c_void,
    extra: *mut *mut c_void,
}

fn check_geometry(config: &LaunchConfig, function: &Function) -> Answer {
    let [threads_x, threads_y, threads_z] = config.block.map(u64::from);
    let threads = threads_x.saturating_mul(threads_y).saturating_mul(threads_z);
    let is_empty = config.grid.contains(&0) || threads == 0;
    let is_wide = config.grid[0] > i32::MAX as u32 || config.grid[1] > 65_535 || config.grid[2] > 65_535;
    if is_empty || is_wide || threads > THREADS_PER_BLOCK.into() || threads_z > 64 {
        return Err(Code::INVALID_VALUE);
    }
    if function.kernel.max_threads.is_some_and(|max| threads > max.into()) {
        return Err(Code::LAUNCH_OUT_OF_RESOURCES);
    }
    if config.shared_bytes as usize > function.dynamic_shared_bytes_max {
        return Err(Code::INVALID_VALUE);
    }
    Ok(())
}

/// Reads the arguments, with the sizes that the PTX gives them.
fn read_params(function: &Function, values: *mut *mut c_void) -> Result<Vec<u8>, Code> {
    let kernel = &function.kernel;
    let mut bytes = vec![0; kernel.param_bytes];
    if values.is_null() && !kernel.params.is_empty() {
        return Err(Code::INVALID_VALUE);
    }
    for (index, param) in kernel.params.iter().enumerate() {
        // SAFETY: the caller gives as many pointers as the kernel has parameters.
        let value = unsafe { *values.add(index) };
        let place = bytes
            .get_mut(param.offset..param.offset + param.bytes)
            .ok_or(Code::INVALID_VALUE)?;
        if value.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: each pointer is to a value of the parameter's size.
        place.copy_from_slice(unsafe { std::slice::from_raw_parts(value.cast::<u8>(), param.bytes) });
    }
    Ok(bytes)
}

fn launch(state: &mut State, function: u64, config: &LaunchConfig, arguments: &Arguments) -> Answer {
    let stream = state.stream(config.stream)?;
    let device = state.streams[stream].device;
    let function = known_function(state, function)?;
    if function.device != device {
        return Err(Code::INVALID_HANDLE);
    }
    if !arguments.extra.is_null() || config.attribute_count != 0 {
        state.misuse("arguments in one buffer and attributes of a launch are not modelled");
        return Err(Code::NOT_SUPPORTED);
    }
    check_geometry(config, function)?;
    let params = read_params(function, arguments.values)?;
    let launch = KernelLaunch {
        kernel: function.kernel.clone(),
        grid: config.grid,
        block: config.block,
        dynamic_shared_bytes: config.shared_bytes as usize,
        params,
    };
    state.submit(stream, Work::Launch(launch.into()))
}

api! {
fn cuModuleLoadData(Context, driver, handle: Out<'_, u64>, image: *const c_void) {
    handle.set(load(driver, image).map_err(|Refused(code, _)| code)?)
}

/// Of the options of the compiler only the log of errors has an effect.
fn cuModuleLoadDataEx(
    Context, driver,
    handle: Out<'_, u64>, image: *const c_void, count: c_uint, options: *mut c_int, values: *mut *mut c_void,
) {
    let loaded = load(driver, image).map_err(|Refused(code, said)| {
        // SAFETY: the caller gives so many options and values, and a buffer of the size that it names.
        unsafe { write_log(&said, count, options, values) };
        code
    });
    handle.set(loaded?)
}

/// Waits for the device. Launches of its functions are refused from then on.
fn cuModuleUnload(Context, driver, module: u64) {
    driver.refuse_in_capture()?;
    let device = driver.modules.get(&module).ok_or(Code::INVALID_HANDLE)?.device;
    driver.wait_for_device(device)?;
    driver.modules.remove(&module);
    driver.functions.retain(|_, function| function.module != module);
    Ok(())
}

fn cuModuleGetFunction(Context, driver, function: Out<'_, u64>, module: u64, name: *const c_char) {
    if name.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: the caller gives a C string.
    let name = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| Code::NOT_FOUND)?;
    function.set(function_of(driver, module, name)?)
}

/// Variables of modules are not modelled.
fn cuModuleGetGlobal_v2(Context, driver, at: Out<'_, u64>, bytes: Out<'_, usize>, _module: u64, _name: *const c_char) {
    driver.misuse("variables of modules are not modelled");
    at.set_if_given(0);
    bytes.set_if_given(0);
    Err(Code::NOT_FOUND)
}

fn cuFuncGetAttribute(Context, driver, value: Out<'_, c_int>, number: c_int, function: u64) {
    let cc = driver.settings.as_ref().map_or(0, |settings| settings.compute_capability);
    value.set(attribute(known_function(driver, function)?, number, cc).ok_or(Code::INVALID_VALUE)?)
}

fn cuFuncSetAttribute(Context, driver, function: u64, number: c_int, value: c_int) {
    set_attribute(driver, function, number, value)
}

fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
    Context, driver, blocks: Out<'_, c_int>, function: u64, threads: c_int, dynamic_shared_bytes: usize,
) {
    blocks.set(occupancy(known_function(driver, function)?, threads, dynamic_shared_bytes)?)
}

#[allow(clippy::too_many_arguments, reason = "NVIDIA's function has them")]
fn cuLaunchKernel(
    Context, driver,
    function: u64, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint, block_z: c_uint,
    shared_bytes: c_uint, stream: u64, values: *mut *mut c_void, extra: *mut *mut c_void,
) {
    let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
    let attributes = std::ptr::null();
    let config = LaunchConfig { grid, block, shared_bytes, stream, attributes, attribute_count: 0 };
    launch(driver, function, &config, &Arguments { values, extra })
}

fn cuLaunchKernelEx(
    Context, driver, config: *const LaunchConfig, function: u64, values: *mut *mut c_void, extra: *mut *mut c_void,
) {
    // SAFETY: the caller gives NULL or a configuration.
    let config = unsafe { config.as_ref() }.ok_or(Code::INVALID_VALUE)?;
    launch(driver, function, config, &Arguments { values, extra })
}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_for_one_chip_runs_on_that_chip_only() {
        assert_eq!(runs_on("sm_90a", 90), Some(true));
        assert_eq!(runs_on("sm_90a", 100), Some(false));
        assert_eq!(runs_on("sm_80", 90), Some(true));
        assert_eq!(runs_on("sm_100f", 103), Some(true));
        assert_eq!(runs_on("sm_100f", 120), Some(false));
        assert_eq!(runs_on("compute_80", 90), None);
    }

    #[test]
    fn ptx_of_a_newer_toolkit_is_refused() {
        let head = "// made by hand\n.version 9.0\n.target sm_80, debug\n.address_size 64\n";
        assert_eq!(check_head(head, 13_000, 90), Ok(()));
        assert_eq!(check_head(head, 12_080, 90), Err(Code::UNSUPPORTED_PTX_VERSION));
        assert_eq!(check_head(head, 13_000, 75), Err(Code::NO_BINARY_FOR_GPU));
        assert_eq!(check_head("no PTX", 13_000, 90), Err(Code::INVALID_PTX));
    }
}
