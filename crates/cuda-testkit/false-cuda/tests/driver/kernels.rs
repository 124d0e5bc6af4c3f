//! Kernels with a bug and their mended twins, through the whole driver; and the limits of a launch.

use ptx_vm::FindingKind;

use crate::support::{
    Session, allocate, assert_clean, assert_found, cu, download, function, get, launch, ok, report, stream, zeros,
};

const HEAD: &str = ".version 8.0\n.target sm_80\n.address_size 64\n";

/// `out[thread] = value`
pub(crate) fn write() -> u64 {
    let body = "
.visible .entry write(.param .u64 write_param_0, .param .u32 write_param_1)
{
    .reg .b32 %r<3>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [write_param_0];
    ld.param.u32 %r1, [write_param_1];
    mov.u32 %r2, %tid.x;
    cvta.to.global.u64 %rd2, %rd1;
    mul.wide.u32 %rd3, %r2, 4;
    add.s64 %rd4, %rd2, %rd3;
    st.global.u32 [%rd4], %r1;
    ret;
}
";
    function(&format!("{HEAD}{body}"), "write")
}

/// `out[thread] = in[thread] + 1`
pub(crate) fn increment() -> u64 {
    let body = "
.visible .entry increment(.param .u64 increment_param_0, .param .u64 increment_param_1)
{
    .reg .b32 %r<4>;
    .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [increment_param_0];
    ld.param.u64 %rd2, [increment_param_1];
    cvta.to.global.u64 %rd3, %rd1;
    cvta.to.global.u64 %rd4, %rd2;
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd5, %r1, 4;
    add.s64 %rd6, %rd3, %rd5;
    add.s64 %rd7, %rd4, %rd5;
    ld.global.u32 %r2, [%rd6];
    add.s32 %r3, %r2, 1;
    st.global.u32 [%rd7], %r3;
    ret;
}
";
    function(&format!("{HEAD}{body}"), "increment")
}

/// Each of 64 threads tells its number to the one opposite, over shared memory. `between` stands between write and read.
fn exchange(between: &str) -> u64 {
    let ptx = format!(
        "{HEAD}
.visible .entry exchange(.param .u64 exchange_param_0)
{{
    .reg .b32 %r<9>;
    .reg .b64 %rd<5>;
    .shared .align 4 .b8 numbers[256];
    ld.param.u64 %rd1, [exchange_param_0];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, numbers;
    shl.b32 %r3, %r1, 2;
    add.s32 %r4, %r2, %r3;
    st.shared.u32 [%r4], %r1;
    {between}
    mov.u32 %r5, 252;
    sub.s32 %r6, %r5, %r3;
    add.s32 %r7, %r2, %r6;
    ld.shared.u32 %r8, [%r7];
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd2, %rd3;
    st.global.u32 [%rd4], %r8;
    ret;
}}
"
    );
    function(&ptx, "exchange")
}

/// Each of 32 threads copies a word over shared memory. `before` stands before the read.
fn copy_async(before: &str) -> u64 {
    let ptx = format!(
        "{HEAD}
.visible .entry copy_async(.param .u64 copy_async_param_0, .param .u64 copy_async_param_1)
{{
    .reg .b32 %r<6>;
    .reg .b64 %rd<8>;
    .shared .align 16 .b8 staged[128];
    ld.param.u64 %rd1, [copy_async_param_0];
    ld.param.u64 %rd2, [copy_async_param_1];
    cvta.to.global.u64 %rd3, %rd1;
    cvta.to.global.u64 %rd4, %rd2;
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd5, %r1, 4;
    add.s64 %rd6, %rd3, %rd5;
    add.s64 %rd7, %rd4, %rd5;
    mov.u32 %r2, staged;
    shl.b32 %r3, %r1, 2;
    add.s32 %r4, %r2, %r3;
    cp.async.ca.shared.global [%r4], [%rd6], 4;
    cp.async.commit_group;
    {before}
    ld.shared.u32 %r5, [%r4];
    st.global.u32 [%rd7], %r5;
    cp.async.wait_group 0;
    ret;
}}
"
    );
    function(&ptx, "copy_async")
}

/// Threads that are allowed: 128. A loop that does not end.
fn forever() -> u64 {
    let body = "
.visible .entry forever()
.maxntid 128, 1, 1
{
$L__BB0_1:
    bra $L__BB0_1;
}
";
    function(&format!("{HEAD}{body}"), "forever")
}

#[test]
fn a_missing_barrier_is_found_for_every_seed() {
    for seed in 0..4 {
        let _session = Session::seeded(seed);
        let (out, stream) = (allocate(256), stream());
        assert_eq!(launch(exchange(""), 64, stream, &[out]), 0);
        ok!(cuStreamSynchronize(stream));
        let kinds = crate::support::kinds();
        assert!(kinds.contains(&FindingKind::RaceShared.to_string()), "{kinds:?}");
        drop(_session);

        let _session = Session::seeded(seed);
        let (out, stream) = (allocate(256), crate::support::stream());
        assert_eq!(launch(exchange("bar.sync 0;"), 64, stream, &[out]), 0);
        ok!(cuStreamSynchronize(stream));
        assert_clean();
        assert_eq!(download(out, 64), (0..64).rev().collect::<Vec<u32>>());
    }
}

#[test]
fn a_missing_wait_for_an_asynchronous_copy_is_found() {
    let _session = Session::seeded(1);
    let (from, to) = (zeros(128), allocate(128));
    assert_eq!(launch(copy_async(""), 32, 0, &[from, to]), 0);
    ok!(cuCtxSynchronize());
    assert_found(FindingKind::ReadBeforeAsyncWait);
    drop(_session);

    let _session = Session::seeded(1);
    let (from, to) = (zeros(128), allocate(128));
    assert_eq!(launch(copy_async("cp.async.wait_group 0;"), 32, 0, &[from, to]), 0);
    ok!(cuCtxSynchronize());
    assert_clean();
}

#[test]
fn a_read_of_memory_without_a_value_is_found() {
    let _session = Session::seeded(1);
    let (from, to) = (allocate(128), allocate(128));
    assert_eq!(launch(increment(), 32, 0, &[from, to]), 0);
    ok!(cuCtxSynchronize());
    assert_found(FindingKind::UninitialisedGlobal);
}

#[test]
fn a_launch_takes_its_arguments_by_value() {
    let _session = Session::seeded(0);
    let out = allocate(16);
    let mut words = [out, 7];
    assert_eq!(launch(write(), 4, 0, &words), 0);
    words[1] = 8;
    assert_eq!(download(out, 4), [7; 4]);
    assert_eq!(words[1], 8);
    let report = report();
    assert_eq!((report.launches, report.calls["cuLaunchKernel"]), (1, 1));
    assert!(report.thread_instructions >= 4 * 8);
    assert_clean();
}

#[test]
fn memory_that_is_not_allocated_ends_the_context() {
    let _session = Session::seeded(1);
    let out = allocate(16);
    let kernel = write();
    let faulty = launch(kernel, 64, 0, &[out, 7]);
    // Work behind it is dropped, or refused if the device has come so far.
    launch(kernel, 4, 0, &[out, 7]);
    assert_eq!(cu!(cuCtxSynchronize()), 700);
    assert!(faulty == 0 || faulty == 700);
    // For good.
    assert_eq!(cu!(cuMemFree_v2(out)), 700);
    assert_eq!(cu!(cuStreamCreate((&mut 0).into(), 0)), 700);
    let report = report();
    assert_eq!((report.faults.len(), report.launches), (1, 1));
    assert!(report.faults[0].contains("write"), "{:?}", report.faults);
}

#[test]
fn a_kernel_that_does_not_end_is_ended() {
    let _session = Session::new(&[("FALSE_CUDA_STEPS_MAX", "1000")]);
    assert_eq!(launch(forever(), 32, 0, &[]), 0);
    assert_eq!(cu!(cuCtxSynchronize()), 702);
}

#[test]
fn more_threads_than_the_kernel_allows_are_refused() {
    let _session = Session::seeded(1);
    assert_eq!(launch(forever(), 256, 0, &[]), 701);
    assert_eq!(launch(write(), 2048, 0, &[0, 0]), 1);
    assert_eq!(launch(write(), 0, 0, &[0, 0]), 1);
    assert_eq!(launch(0x77, 1, 0, &[]), 400);
}

#[test]
fn dynamic_shared_memory_has_to_be_asked_for() {
    let _session = Session::seeded(1);
    let (kernel, out) = (write(), allocate(16));
    let words = [out, 7];
    let mut params = words.each_ref().map(|word| (word as *const u64).cast_mut().cast());
    let mut launch = |bytes| {
        let extra = std::ptr::null_mut();
        cu!(cuLaunchKernel(
            kernel,
            1,
            1,
            1,
            4,
            1,
            1,
            bytes,
            0,
            params.as_mut_ptr(),
            extra
        ))
    };
    assert_eq!(launch(48 << 10), 0);
    assert_eq!(launch((48 << 10) + 1), 1);
    ok!(cuFuncSetAttribute(kernel, 8, 100 << 10));
    assert_eq!(launch(100 << 10), 0);
    assert_eq!(cu!(cuFuncSetAttribute(kernel, 8, 228 << 10)), 1);
    let blocks = get(|blocks| {
        cu!(cuOccupancyMaxActiveBlocksPerMultiprocessor(
            blocks,
            kernel,
            128,
            100 << 10
        ))
    });
    assert_eq!(blocks, 2);
    ok!(cuCtxSynchronize());
    assert_clean();
}

#[test]
fn a_module_that_cannot_run_is_refused_with_its_reason() {
    let _session = Session::seeded(1);
    let load = |image: &std::ffi::CStr| {
        let mut module = 0;
        cu!(cuModuleLoadData((&mut module).into(), image.as_ptr().cast()))
    };
    assert_eq!(load(c"\x7fELF\x02\x01\x01"), 209);
    assert_eq!(load(c".version 8.0\n.target sm_120\n.address_size 64\n"), 209);
    assert_eq!(load(c".version 9.9\n.target sm_80\n.address_size 64\n"), 222);
    assert_eq!(load(c"no PTX"), 218);
    assert_clean();
    let unknown =
        c".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry f() { wgmma.fence.sync.aligned; ret; }\n";
    assert_eq!(load(unknown), 218);
    assert_found(FindingKind::BadModule);
    // The log of the compiler has the reason, as far as it fits.
    let (mut log, mut module) = ([1_u8; 30], 0_u64);
    let (mut options, room) = ([5, 6], std::ptr::without_provenance_mut(log.len()));
    let mut values = [log.as_mut_ptr().cast(), room];
    let (options, values) = (options.as_mut_ptr(), values.as_mut_ptr());
    let place = (&mut module).into();
    assert_eq!(
        cu!(cuModuleLoadDataEx(place, unknown.as_ptr().cast(), 2, options, values)),
        218
    );
    let said = std::ffi::CStr::from_bytes_until_nul(&log).unwrap().to_str().unwrap();
    assert!(said.len() == 29 && said.contains("line 4"), "{said}");
}
