//! Calls that fail because a variable says so, and calls in the wrong state.

use std::ffi::CStr;
use std::path::PathBuf;

use crate::support::{Session, allocate, assert_clean, cu, event, get, make_current, ok, report, stream};

#[test]
fn a_machine_without_a_device_says_so() {
    let _session = Session::bare(&[("FALSE_CUDA_DEVICES", "0")]);
    assert_eq!(cu!(cuInit(0)), 100);
    assert_eq!(cu!(cuDeviceGetCount((&mut 0).into())), 3);
    assert_eq!(get(|version| cu!(cuDriverGetVersion(version))), 13_000);
}

#[test]
fn the_nth_call_fails() {
    let _session = Session::new(&[("FALSE_CUDA_FAIL", "cuMemAlloc_v2:2:2,cuStreamCreate:1:719")]);
    allocate(16);
    let mut place = 0;
    assert_eq!(cu!(cuMemAlloc_v2((&mut place).into(), 16)), 2);
    allocate(16);
    assert_eq!(report().calls["cuMemAlloc_v2"], 3);
    // An error that would end the context of a device ends it here too.
    assert_eq!(cu!(cuStreamCreate((&mut place).into(), 0)), 719);
    assert_eq!(cu!(cuCtxSynchronize()), 719);
}

/// A file of this test process that is not there yet.
fn file(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("false-cuda-{name}-{}", std::process::id()))
}

#[test]
fn a_device_hangs_while_there_is_a_file() {
    let hang = file("hang");
    let _session = Session::new(&[("FALSE_CUDA_HANG", hang.to_str().unwrap())]);
    let (at, stream, event) = (allocate(16), stream(), event());
    std::fs::write(&hang, "").unwrap();
    ok!(cuMemsetD8Async(at, 0, 16, stream));
    ok!(cuEventRecord(event, stream));
    for _ in 0..100 {
        assert_eq!(cu!(cuEventQuery(event)), 600);
    }
    std::fs::remove_file(&hang).unwrap();
    ok!(cuEventSynchronize(event));
    assert_clean();
}

#[test]
fn a_device_is_lost_once_there_is_a_file() {
    let lost = file("lost");
    let _session = Session::new(&[("FALSE_CUDA_LOST", lost.to_str().unwrap())]);
    let (at, stream) = (allocate(16), stream());
    ok!(cuMemsetD8Async(at, 0, 16, stream));
    ok!(cuStreamSynchronize(stream));
    std::fs::write(&lost, "").unwrap();
    // The device may come to this work within the call, or later.
    let _ = cu!(cuMemsetD8Async(at, 0, 16, stream));
    assert_eq!(cu!(cuCtxSynchronize()), 719);
    std::fs::remove_file(&lost).unwrap();
    assert_eq!(report().faults.len(), 1);
    assert_eq!(cu!(cuEventCreate((&mut 0).into(), 0)), 719);
}

#[test]
fn a_call_needs_the_start_and_a_context() {
    let _session = Session::bare(&[]);
    let mut place = 0;
    assert_eq!(cu!(cuDeviceGetCount((&mut 0).into())), 3);
    ok!(cuInit(0));
    ok!(cuCtxSetCurrent(0));
    assert_eq!(cu!(cuMemAlloc_v2((&mut place).into(), 16)), 201);
    let context = get(|context| cu!(cuDevicePrimaryCtxRetain(context, 0)));
    assert_eq!(cu!(cuMemAlloc_v2((&mut place).into(), 16)), 201);
    ok!(cuCtxPushCurrent_v2(context));
    allocate(16);
    assert_eq!(get(|device| cu!(cuCtxGetDevice(device))), 0);
    assert_eq!(get(|popped| cu!(cuCtxPopCurrent_v2(popped))), context);
    assert_eq!(cu!(cuMemAlloc_v2((&mut place).into(), 16)), 201);
    ok!(cuDevicePrimaryCtxRelease_v2(0));
    assert_eq!(cu!(cuCtxSetCurrent(context)), 201);
}

#[test]
fn devices_do_not_see_each_others_memory() {
    let _session = Session::new(&[("FALSE_CUDA_DEVICES", "2")]);
    let at = allocate(16);
    let other = get(|context| cu!(cuDevicePrimaryCtxRetain(context, 1)));
    ok!(cuCtxSetCurrent(other));
    assert_eq!(crate::support::launch(crate::kernels::write(), 4, 0, &[at, 1]), 0);
    assert_eq!(cu!(cuCtxSynchronize()), 700);
    // The other device goes on.
    make_current();
    ok!(cuCtxSynchronize());
    let uuid = |device| get(|uuid| cu!(cuDeviceGetUuid_v2(uuid, device)));
    assert_ne!(uuid(0), uuid(1));
    assert_eq!(cu!(cuDeviceGet((&mut 0).into(), 2)), 101);
}

#[test]
fn errors_have_names() {
    let name = |code| {
        let mut name: *const std::ffi::c_char = std::ptr::null();
        // SAFETY: the driver answers a C string or NULL.
        (
            cu!(cuGetErrorName(code, (&mut name).into())),
            (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) }),
        )
    };
    assert_eq!(name(700), (0, Some(c"CUDA_ERROR_ILLEGAL_ADDRESS")));
    assert_eq!(name(0), (0, Some(c"CUDA_SUCCESS")));
    assert_eq!(name(12_345), (1, None));
}

#[test]
fn a_device_is_described_as_the_variables_say() {
    let _session = Session::new(&[
        ("FALSE_CUDA_CC", "8.9"),
        ("FALSE_CUDA_NAME", "False L40S, of a long name"),
    ]);
    let attribute = |number| get(|value| cu!(cuDeviceGetAttribute(value, number, 0)));
    assert_eq!(
        (attribute(75), attribute(76), attribute(97), attribute(10)),
        (8, 9, 99 << 10, 32)
    );
    let mut name = [1 as std::ffi::c_char; 11];
    ok!(cuDeviceGetName((&mut name[0]).into(), 11, 0));
    // SAFETY: the driver has ended the text.
    assert_eq!(unsafe { CStr::from_ptr(name.as_ptr()) }, c"False L40S");
    assert_clean();
    assert_eq!(cu!(cuDeviceGetAttribute((&mut 0).into(), 9999, 0)), 1);
}

#[test]
fn the_report_is_written_as_json() {
    let folder = std::env::temp_dir().join(format!("false-cuda-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("report-%p.json");
    let _session = Session::new(&[("FALSE_CUDA_REPORT", path.to_str().unwrap())]);
    allocate(16);
    assert_eq!(false_cuda::false_cuda_report(), 0);
    let written = folder.join(format!("report-{}.json", std::process::id()));
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(written).unwrap()).unwrap();
    assert_eq!(report["leaks"]["allocations"], 1);
    assert_eq!(report["calls"]["cuInit"], 1);
    std::fs::remove_dir_all(folder).unwrap();
}
