//! Owns the exported functions (`cublasLt.h` 13.1). Handles are numbers here, which is the same to a caller on a 64-bit machine.

use std::ffi::{c_char, c_int, c_void};

use crate::attributes::{self, Kind, Object, layout, operation, preference};
use crate::outside_abi::{GiveWork, OUTSIDE_ENDED, OutsideAccess, OutsideWork};
use crate::product::{Objects, Operands, Product};
use crate::status::{Answer, Status, name_of, number_of};

/// Of the library that the reference machine has: 13.1.0.
const VERSION: usize = 130_100;
/// What the one algorithm takes of the workspace that it may have. It needs none; it writes it, as the real ones do, so that two
/// streams with one workspace are found.
const WORKSPACE_BYTES_MAX: u64 = 64 << 10;
/// How much a workspace has to be aligned.
const WORKSPACE_ALIGNMENT: u64 = 16;
/// Tells an algorithm that the heuristic gave from other bytes.
const ALGORITHM_MARK: u64 = 0x6661_6c73_656c_7400;

/// `cublasLtMatmulAlgo_t`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Algorithm {
    data: [u64; 8],
}

/// `cublasLtMatmulHeuristicResult_t`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct HeuristicResult {
    algorithm: Algorithm,
    workspace_bytes: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

#[cfg(not(test))]
fn driver() -> Option<GiveWork> {
    crate::outside_abi::loaded_driver()
}

#[cfg(test)]
fn driver() -> Option<GiveWork> {
    Some(tests::give)
}

/// # Safety
/// `place` is NULL or a place for a `T`.
unsafe fn put<T>(place: *mut T, value: T) -> Answer {
    if place.is_null() {
        return Err(Status::InvalidValue);
    }
    // SAFETY: the caller of this function promises it.
    unsafe { place.write(value) };
    Ok(())
}

/// # Safety
/// `value` is NULL or has so many bytes.
unsafe fn set(handle: u64, kind: Kind, attribute: c_int, value: (*const c_void, usize)) -> c_int {
    let (value, bytes) = value;
    // No attribute has more than eight bytes, so more are not looked at.
    if value.is_null() || bytes > 8 {
        return Status::InvalidValue as c_int;
    }
    // SAFETY: the caller of this function promises it.
    let value = unsafe { std::slice::from_raw_parts(value.cast::<u8>(), bytes) };
    number_of(attributes::set(handle, kind, attribute, value))
}

/// Makes exported functions whose bodies answer a status.
macro_rules! exported {
    ($(
        $(#[$attribute:meta])*
        fn $name:ident($($argument:ident: $type:ty),* $(,)?) -> c_int $body:block
    )*) => { $(
        $(#[$attribute])*
        // SAFETY: no other library that is loaded beside this one has these names.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> c_int $body
    )* };
}

exported! {
fn cublasLtCreate(handle: *mut u64) -> c_int {
    if driver().is_none() {
        return Status::NotInitialized as c_int;
    }
    // SAFETY: the caller gives a place for a handle.
    number_of(unsafe { put(handle, attributes::add(Object::new(Kind::Handle, &[]))) })
}

fn cublasLtDestroy(handle: u64) -> c_int {
    number_of(attributes::remove(handle, Kind::Handle))
}

fn cublasLtMatmulDescCreate(handle: *mut u64, compute_type: c_int, scale_type: c_int) -> c_int {
    let values = [(operation::COMPUTE_TYPE, compute_type as u64), (operation::SCALE_TYPE, scale_type as u64)];
    // SAFETY: the caller gives a place for a handle.
    number_of(unsafe { put(handle, attributes::add(Object::new(Kind::Operation, &values))) })
}

fn cublasLtMatmulDescDestroy(handle: u64) -> c_int {
    number_of(attributes::remove(handle, Kind::Operation))
}

fn cublasLtMatmulDescSetAttribute(handle: u64, attribute: c_int, value: *const c_void, bytes: usize) -> c_int {
    // SAFETY: the caller gives a value of so many bytes.
    unsafe { set(handle, Kind::Operation, attribute, (value, bytes)) }
}

fn cublasLtMatrixLayoutCreate(handle: *mut u64, kind: c_int, rows: u64, columns: u64, ld: i64) -> c_int {
    use layout::{COLS, LD, ROWS, TYPE};
    let values = [(TYPE, kind as u64), (ROWS, rows), (COLS, columns), (LD, ld as u64)];
    // SAFETY: the caller gives a place for a handle.
    number_of(unsafe { put(handle, attributes::add(Object::new(Kind::Layout, &values))) })
}

fn cublasLtMatrixLayoutDestroy(handle: u64) -> c_int {
    number_of(attributes::remove(handle, Kind::Layout))
}

fn cublasLtMatrixLayoutSetAttribute(handle: u64, attribute: c_int, value: *const c_void, bytes: usize) -> c_int {
    // SAFETY: the caller gives a value of so many bytes.
    unsafe { set(handle, Kind::Layout, attribute, (value, bytes)) }
}

fn cublasLtMatmulPreferenceCreate(handle: *mut u64) -> c_int {
    // SAFETY: the caller gives a place for a handle.
    number_of(unsafe { put(handle, attributes::add(Object::new(Kind::Preference, &[]))) })
}

fn cublasLtMatmulPreferenceDestroy(handle: u64) -> c_int {
    number_of(attributes::remove(handle, Kind::Preference))
}

fn cublasLtMatmulPreferenceSetAttribute(handle: u64, attribute: c_int, value: *const c_void, bytes: usize) -> c_int {
    // SAFETY: the caller gives a value of so many bytes.
    unsafe { set(handle, Kind::Preference, attribute, (value, bytes)) }
}

#[allow(clippy::too_many_arguments, reason = "NVIDIA's function has them")]
fn cublasLtMatmulAlgoGetHeuristic(
    handle: u64, operation: u64, a: u64, b: u64, c: u64, d: u64, preference: u64,
    asked: c_int, results: *mut HeuristicResult, found: *mut c_int,
) -> c_int {
    let workspace_bytes = check(handle, [operation, a, b, c, d]).and_then(|_| {
        let preference = attributes::find(preference, Kind::Preference)?;
        let allowed = preference.get(preference::MAX_WORKSPACE_BYTES, 0);
        if asked < 1 { Err(Status::InvalidValue) } else { Ok(allowed.min(WORKSPACE_BYTES_MAX)) }
    });
    let count = c_int::from(workspace_bytes.is_ok());
    let answer = workspace_bytes.and_then(|bytes| {
        let algorithm = Algorithm { data: [ALGORITHM_MARK, bytes, 0, 0, 0, 0, 0, 0] };
        let (state, waves, reserved) = (0, 1.0, [0; 4]);
        let result = HeuristicResult { algorithm, workspace_bytes: bytes as usize, state, waves, reserved };
        // SAFETY: the caller gives a place for as many results as it asks for, which are one or more.
        unsafe { put(results, result) }
    });
    // SAFETY: the caller gives a place for the count.
    number_of(answer.and(unsafe { put(found, count) }))
}

#[allow(clippy::too_many_arguments, reason = "NVIDIA's function has them")]
fn cublasLtMatmul(
    handle: u64, operation: u64, alpha: *const f32, a: u64, a_layout: u64, b: u64, b_layout: u64,
    beta: *const f32, c: u64, c_layout: u64, d: u64, d_layout: u64,
    algorithm: *const Algorithm, workspace: u64, workspace_bytes: usize, stream: u64,
) -> c_int {
    let objects = [operation, a_layout, b_layout, c_layout, d_layout];
    // SAFETY: the caller gives NULL or one f32 each, in memory of the host, and NULL or an algorithm.
    let (alpha, beta, algorithm) = unsafe { (alpha.as_ref(), beta.as_ref(), algorithm.as_ref()) };
    let (Some(alpha), Some(beta)) = (alpha, beta) else { return Status::InvalidValue as c_int };
    let operands = Operands { a, b, c, d, alpha: *alpha, beta: *beta };
    let room = Workspace { at: workspace, bytes: workspace_bytes };
    number_of(check(handle, objects).and_then(|product| {
        let access = room.access(algorithm)?;
        start(Multiplication { product, operands }, access, stream)
    }))
}
}

// SAFETY: no other library has this name.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetVersion() -> usize {
    VERSION
}

// SAFETY: no other library has this name.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetStatusName(status: c_int) -> *const c_char {
    name_of(status).as_ptr()
}

// SAFETY: no other library has this name.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetStatusString(status: c_int) -> *const c_char {
    name_of(status).as_ptr()
}

/// The product of a call: the operation, and the layouts of a, b, c and d.
fn check(handle: u64, objects: [u64; 5]) -> Result<Product, Status> {
    attributes::find(handle, Kind::Handle).map_err(|_| Status::NotInitialized)?;
    let [operation, a, b, c, d] = objects;
    let layout = |handle| attributes::find(handle, Kind::Layout);
    let operation = attributes::find(operation, Kind::Operation)?;
    Product::check(&Objects {
        operation,
        a: layout(a)?,
        b: layout(b)?,
        c: layout(c)?,
        d: layout(d)?,
    })
}

struct Workspace {
    at: u64,
    bytes: usize,
}

impl Workspace {
    /// What the algorithm writes. Without an algorithm one is chosen that takes what it gets.
    fn access(&self, algorithm: Option<&Algorithm>) -> Result<OutsideAccess, Status> {
        let needed = match algorithm {
            None => (self.bytes as u64).min(WORKSPACE_BYTES_MAX),
            Some(Algorithm {
                data: [ALGORITHM_MARK, needed, ..],
            }) => *needed,
            Some(_) => return Err(Status::InvalidValue),
        };
        let has_room = needed <= self.bytes as u64 && self.at.is_multiple_of(WORKSPACE_ALIGNMENT);
        if needed > 0 && (!has_room || self.at == 0) {
            return Err(Status::InvalidValue);
        }
        Ok(OutsideAccess {
            at: self.at,
            bytes: needed as usize,
            is_write: 1,
        })
    }
}

struct Multiplication {
    product: Product,
    operands: Operands,
}

fn start(work: Multiplication, workspace: OutsideAccess, stream: u64) -> Answer {
    let give = driver().ok_or(Status::NotInitialized)?;
    let mut accesses = work.product.accesses(&work.operands);
    accesses.push(workspace);
    let work = OutsideWork {
        name: c"cublasLtMatmul".as_ptr(),
        poll: multiply,
        release: forget,
        context: Box::into_raw(Box::new(work)) as u64,
        accesses: accesses.as_ptr(),
        access_count: accesses.len(),
        is_repeatable: 1,
    };
    // SAFETY: the work is as `outside_abi.rs` wants it, and its pointers are good until the call has returned.
    match unsafe { give(stream, &work) } {
        0 => Ok(()),
        1 => Err(Status::InvalidValue),
        _ => Err(Status::ExecutionFailed),
    }
}

unsafe extern "C" fn multiply(context: u64) -> c_int {
    // SAFETY: the context is the box that `start` made, and `forget` was not called yet.
    let work = unsafe { &*(context as *const Multiplication) };
    work.product.run(&work.operands);
    OUTSIDE_ENDED
}

unsafe extern "C" fn forget(context: u64) {
    // SAFETY: the driver calls this once, and uses the context no more.
    drop(unsafe { Box::from_raw(context as *mut Multiplication) });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A driver that does the work at once.
    pub(super) unsafe extern "C" fn give(_stream: u64, work: *const OutsideWork) -> c_int {
        // SAFETY: `start` gives a work, and this stands for the driver.
        unsafe {
            ((*work).poll)((*work).context);
            ((*work).release)((*work).context);
        }
        0
    }

    /// Handle, operation, one layout of f32 1 x 1, preference with so much workspace.
    fn objects(workspace_bytes: u64) -> [u64; 4] {
        let [mut handle, mut operation, mut layout, mut preference] = [0; 4];
        // SAFETY: every pointer is to a value of the right type on this stack.
        unsafe {
            assert_eq!(cublasLtCreate(&mut handle), 0);
            assert_eq!(cublasLtMatmulDescCreate(&mut operation, 68, 0), 0);
            assert_eq!(cublasLtMatrixLayoutCreate(&mut layout, 0, 1, 1, 1), 0);
            assert_eq!(cublasLtMatmulPreferenceCreate(&mut preference), 0);
            let value = (&raw const workspace_bytes).cast();
            assert_eq!(cublasLtMatmulPreferenceSetAttribute(preference, 1, value, 8), 0);
        }
        [handle, operation, layout, preference]
    }

    fn heuristic(objects: [u64; 4]) -> (c_int, c_int, HeuristicResult) {
        let [handle, operation, l, preference] = objects;
        let algorithm = Algorithm { data: [0; 8] };
        let mut result = HeuristicResult {
            algorithm,
            workspace_bytes: 0,
            state: 9,
            waves: 0.0,
            reserved: [0; 4],
        };
        let mut found = -1;
        // SAFETY: both pointers are to values on this stack.
        let status = unsafe {
            cublasLtMatmulAlgoGetHeuristic(handle, operation, l, l, l, l, preference, 1, &mut result, &mut found)
        };
        (status, found, result)
    }

    #[test]
    fn the_results_have_the_sizes_of_the_real_ones() {
        assert_eq!((size_of::<Algorithm>(), size_of::<HeuristicResult>()), (64, 96));
    }

    #[test]
    fn a_product_goes_from_the_heuristic_to_the_result() {
        let objects = objects(0);
        let (status, found, result) = heuristic(objects);
        assert_eq!((status, found, result.state, result.workspace_bytes), (0, 1, 0, 0));
        let [handle, operation, l, _] = objects;
        let (a, b, mut d, one, zero) = (3.0_f32, 4.0_f32, 0.0_f32, 1.0_f32, 0.0_f32);
        let (a, b, d_at) = (&raw const a as u64, &raw const b as u64, &raw mut d as u64);
        let algorithm = &result.algorithm;
        // SAFETY: all addresses are of values on this stack.
        let status = unsafe {
            cublasLtMatmul(
                handle, operation, &one, a, l, b, l, &zero, d_at, l, d_at, l, algorithm, 0, 0, 0,
            )
        };
        assert_eq!((status, d), (0, 12.0));
    }

    #[test]
    fn a_workspace_that_the_algorithm_needs_has_to_be_there() {
        let (_, _, result) = heuristic(objects(1 << 20));
        assert_eq!(result.workspace_bytes as u64, WORKSPACE_BYTES_MAX);
        let refused = |at, bytes| Workspace { at, bytes }.access(Some(&result.algorithm)).is_err();
        assert!(refused(0x1000, 100) && refused(0, 1 << 20) && refused(0x1008, 1 << 20));
        assert!(!refused(0x1000, 1 << 20));
        let foreign = Algorithm { data: [0; 8] };
        assert!(Workspace { at: 0x1000, bytes: 0 }.access(Some(&foreign)).is_err());
    }

    #[test]
    fn an_unsupported_product_has_no_algorithm() {
        let objects = objects(0);
        let epilogue = 4_i32;
        // SAFETY: the pointer is to a value on this stack.
        let set = unsafe { cublasLtMatmulDescSetAttribute(objects[1], 7, (&raw const epilogue).cast(), 4) };
        assert_eq!(set, 0);
        let (status, found, _) = heuristic(objects);
        assert_eq!((status, found), (Status::NotSupported as c_int, 0));
    }
}
