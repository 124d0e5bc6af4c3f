//! What the tests share: a driver of their own, and calls that have to succeed.

use std::ffi::{CString, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use false_cuda::{Out, Report};

/// Calls a function of the driver.
macro_rules! cu {
    ($name:ident($($argument:expr),* $(,)?)) => {
        // SAFETY: the tests give places on their stacks, pinned or device memory of theirs, and C strings.
        unsafe { false_cuda::$name($($argument),*) }
    };
}
/// Calls a function that has to succeed.
macro_rules! ok {
    ($name:ident($($argument:expr),* $(,)?)) => {
        assert_eq!(crate::support::cu!($name($($argument),*)), 0, stringify!($name))
    };
}
pub(crate) use {cu, ok};

pub(crate) const NON_BLOCKING: u32 = 1;
pub(crate) const DISABLE_TIMING: u32 = 2;
pub(crate) const INTERPROCESS: u32 = 4;

/// The driver, new and alone: there is one in a process.
pub(crate) struct Session(#[allow(dead_code, reason = "it is held, not used")] MutexGuard<'static, ()>);

static ALONE: Mutex<()> = Mutex::new(());

/// Variables that the tests set beside their own: no idle device, so that the seed alone decides the order.
const STEADY: (&str, &str) = ("FALSE_CUDA_IDLE_MS", "0");

impl Session {
    /// A driver that nobody has initialised.
    pub(crate) fn bare(variables: &[(&str, &str)]) -> Self {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all = variables.to_vec();
        if !all.iter().any(|(name, _)| *name == STEADY.0) {
            all.push(STEADY);
        }
        false_cuda::reset_with(&all).unwrap();
        Self(alone)
    }

    /// With a current context.
    pub(crate) fn new(variables: &[(&str, &str)]) -> Self {
        let session = Self::bare(variables);
        ok!(cuInit(0));
        make_current();
        session
    }

    pub(crate) fn seeded(seed: u64) -> Self {
        Self::new(&[("FALSE_CUDA_SEED", &seed.to_string())])
    }
}

pub(crate) fn make_current() {
    let context = get(|context| cu!(cuDevicePrimaryCtxRetain(context, 0)));
    ok!(cuCtxSetCurrent(context));
}

/// The result that a call writes to its place.
pub(crate) fn get<T: Default>(call: impl FnOnce(Out<'_, T>) -> i32) -> T {
    let mut value = T::default();
    assert_eq!(call(Out::from(&mut value)), 0);
    value
}

pub(crate) fn stream() -> u64 {
    get(|handle| cu!(cuStreamCreate(handle, NON_BLOCKING)))
}

pub(crate) fn event() -> u64 {
    get(|handle| cu!(cuEventCreate(handle, DISABLE_TIMING)))
}

pub(crate) fn allocate(bytes: usize) -> u64 {
    get(|at| cu!(cuMemAlloc_v2(at, bytes)))
}

/// Memory that has a value.
pub(crate) fn zeros(bytes: usize) -> u64 {
    let at = allocate(bytes);
    ok!(cuMemsetD8_v2(at, 0, bytes));
    ok!(cuCtxSynchronize());
    at
}

/// Pinned memory of so many words, as the host sees it.
pub(crate) fn pinned(words: usize) -> &'static mut [u32] {
    let mut at: *mut c_void = std::ptr::null_mut();
    ok!(cuMemHostAlloc((&mut at).into(), words * 4, 0));
    // SAFETY: the memory stays mapped for the test, which has it alone.
    unsafe { std::slice::from_raw_parts_mut(at.cast(), words) }
}

pub(crate) fn upload(at: u64, words: &[u32]) {
    ok!(cuMemcpyHtoD_v2(at, words.as_ptr().cast(), size_of_val(words)));
}

pub(crate) fn download(at: u64, words: usize) -> Vec<u32> {
    let mut host = vec![0_u32; words];
    ok!(cuMemcpyDtoH_v2(host.as_mut_ptr().cast(), at, words * 4));
    host
}

/// The function `name` of a module of its own.
pub(crate) fn function(ptx: &str, name: &str) -> u64 {
    let ptx = CString::new(ptx).unwrap();
    let module = get(|module| cu!(cuModuleLoadData(module, ptx.as_ptr().cast())));
    let name = CString::new(name).unwrap();
    get(|function| cu!(cuModuleGetFunction(function, module, name.as_ptr())))
}

/// One block. A parameter takes as many bytes of its word as it has.
pub(crate) fn launch(function: u64, threads: u32, stream: u64, words: &[u64]) -> i32 {
    let mut params: Vec<*mut c_void> = words
        .iter()
        .map(|word| (word as *const u64).cast_mut().cast())
        .collect();
    let extra = std::ptr::null_mut();
    cu!(cuLaunchKernel(
        function,
        1,
        1,
        1,
        threads,
        1,
        1,
        0,
        stream,
        params.as_mut_ptr(),
        extra
    ))
}

/// The kinds of the findings, each once, sorted.
pub(crate) fn kinds() -> Vec<String> {
    let mut kinds: Vec<String> = report().findings.into_iter().map(|finding| finding.kind).collect();
    kinds.sort();
    kinds.dedup();
    kinds
}

pub(crate) fn report() -> Report {
    false_cuda::report()
}

#[track_caller]
pub(crate) fn assert_clean() {
    let report = report();
    assert!(
        report.findings.is_empty() && report.faults.is_empty(),
        "{:?} {:?}",
        report.findings,
        report.faults
    );
}

#[track_caller]
pub(crate) fn assert_found(kind: ptx_vm::FindingKind) {
    assert_eq!(kinds(), [kind.to_string()]);
}
