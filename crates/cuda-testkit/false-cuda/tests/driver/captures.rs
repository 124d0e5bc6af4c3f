//! Capture of streams into graphs.

use ptx_vm::FindingKind;

use crate::kernels::{increment, write};
use crate::support::{
    Session, allocate, assert_clean, assert_found, cu, download, event, get, launch, ok, pinned, report, stream,
    upload, zeros,
};

const GLOBAL: u32 = 0;
const THREAD_LOCAL: u32 = 1;
const RELAXED: u32 = 2;

fn begin(stream: u64, mode: u32) {
    ok!(cuStreamBeginCapture_v2(stream, mode));
}

fn end(stream: u64) -> (i32, u64) {
    let mut graph = 1;
    (cu!(cuStreamEndCapture(stream, (&mut graph).into())), graph)
}

fn instantiate(graph: u64) -> u64 {
    get(|executable| cu!(cuGraphInstantiateWithFlags(executable, graph, 0)))
}

#[test]
fn captured_work_runs_when_the_graph_is_launched_and_each_time() {
    for seed in 0..4 {
        let _session = Session::seeded(seed);
        let (at, stream, kernel) = (zeros(16), stream(), increment());
        begin(stream, THREAD_LOCAL);
        assert_eq!(launch(kernel, 4, stream, &[at, at]), 0);
        assert_eq!(launch(kernel, 4, stream, &[at, at]), 0);
        assert_eq!(get(|status| cu!(cuStreamIsCapturing(stream, status))), 1);
        let (code, graph) = end(stream);
        assert_eq!((code, report().launches), (0, 0));
        let executable = instantiate(graph);
        ok!(cuGraphDestroy(graph));
        ok!(cuGraphUpload(executable, stream));
        for _ in 0..3 {
            ok!(cuGraphLaunch(executable, stream));
        }
        ok!(cuStreamSynchronize(stream));
        assert_eq!(download(at, 4), [6; 4]);
        ok!(cuGraphExecDestroy(executable));
        assert_clean();
        assert_eq!(report().leaks.graphs, 0);
    }
}

#[test]
fn a_graph_reads_its_source_at_each_launch() {
    let _session = Session::seeded(1);
    let (at, stream, source) = (allocate(16), stream(), pinned(4));
    begin(stream, THREAD_LOCAL);
    ok!(cuMemcpyHtoDAsync_v2(at, source.as_ptr().cast(), 16, stream));
    let executable = instantiate(end(stream).1);
    for value in [5, 6] {
        source.fill(value);
        ok!(cuGraphLaunch(executable, stream));
        ok!(cuStreamSynchronize(stream));
        assert_eq!(download(at, 4), [value; 4]);
    }
    assert_clean();
    ok!(cuGraphLaunch(executable, stream));
    source.fill(7);
    ok!(cuStreamSynchronize(stream));
    assert_found(FindingKind::PinnedSourceChanged);
}

/// Forks `two` off `one`, writes on both, and joins them if asked to.
fn fork(one: u64, two: u64, work: impl FnOnce(), joins: bool) {
    let (forked, joined) = (event(), event());
    begin(one, THREAD_LOCAL);
    ok!(cuEventRecord(forked, one));
    ok!(cuStreamWaitEvent(two, forked, 0));
    work();
    if joins {
        ok!(cuEventRecord(joined, two));
        ok!(cuStreamWaitEvent(one, joined, 0));
    }
}

#[test]
fn a_second_stream_is_captured_when_it_waits_for_an_event_of_the_first() {
    for seed in 0..4 {
        let _session = Session::seeded(seed);
        let (first, second, sum, kernel) = (allocate(16), allocate(16), allocate(16), write());
        let (one, two, add) = (stream(), stream(), increment());
        let work = || {
            assert_eq!(launch(kernel, 4, one, &[first, 1]), 0);
            assert_eq!(launch(kernel, 4, two, &[second, 2]), 0);
        };
        fork(one, two, work, true);
        // Behind the join, so it sees what the second stream did.
        assert_eq!(launch(add, 4, one, &[second, sum]), 0);
        let (code, graph) = end(one);
        assert_eq!(code, 0);
        assert_eq!(get(|status| cu!(cuStreamIsCapturing(two, status))), 0);
        let executable = instantiate(graph);
        ok!(cuGraphLaunch(executable, one));
        ok!(cuGraphLaunch(executable, one));
        ok!(cuStreamSynchronize(one));
        assert_eq!((download(first, 4), download(sum, 4)), (vec![1; 4], vec![3; 4]));
        assert_clean();
    }
}

#[test]
fn a_graph_ends_when_all_of_its_branches_have() {
    for seed in 0..4 {
        let _session = Session::seeded(seed);
        let (at, sum, one, two) = (allocate(16), allocate(16), stream(), stream());
        let (kernel, add) = (write(), increment());
        fork(one, two, || assert_eq!(launch(kernel, 4, two, &[at, 2]), 0), true);
        let executable = instantiate(end(one).1);
        ok!(cuGraphLaunch(executable, one));
        assert_eq!(launch(add, 4, one, &[at, sum]), 0);
        ok!(cuStreamSynchronize(one));
        assert_eq!(download(sum, 4), [3; 4]);
        assert_clean();
    }
}

#[test]
fn a_race_between_two_branches_of_a_graph_is_found() {
    let _session = Session::seeded(1);
    let (at, one, two, kernel) = (allocate(16), stream(), stream(), write());
    let work = || {
        assert_eq!(launch(kernel, 4, one, &[at, 1]), 0);
        assert_eq!(launch(kernel, 4, two, &[at, 2]), 0);
    };
    fork(one, two, work, true);
    let executable = instantiate(end(one).1);
    ok!(cuGraphLaunch(executable, one));
    ok!(cuStreamSynchronize(one));
    assert_found(FindingKind::RaceBetweenStreams);
}

#[test]
fn a_stream_that_is_not_joined_fails_the_capture() {
    let _session = Session::seeded(1);
    let (at, one, two, kernel) = (allocate(16), stream(), stream(), write());
    fork(one, two, || assert_eq!(launch(kernel, 4, two, &[at, 2]), 0), false);
    assert_eq!(end(one), (904, 0));
    assert_eq!(get(|status| cu!(cuStreamIsCapturing(two, status))), 0);
}

#[test]
fn a_capture_ends_where_it_began() {
    let _session = Session::seeded(1);
    let (one, two) = (stream(), stream());
    fork(one, two, || (), true);
    assert_eq!(end(two), (903, 0));
    assert_eq!(end(one), (901, 0));
    assert_eq!(end(one), (401, 0));
    begin(one, THREAD_LOCAL);
    let ended = std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            crate::support::make_current();
            end(one)
        });
        other.join().unwrap()
    });
    assert_eq!(ended, (908, 0));
    assert_eq!(cu!(cuStreamBeginCapture_v2(one, RELAXED)), 401);
    assert_eq!(end(one).0, 0);
    assert_eq!(cu!(cuStreamBeginCapture_v2(0, RELAXED)), 900);
}

#[test]
fn an_allocation_during_a_capture_is_refused_and_ends_it() {
    let _session = Session::seeded(1);
    let (stream, kernel) = (stream(), write());
    begin(stream, GLOBAL);
    let mut place = 0;
    assert_eq!(cu!(cuMemAlloc_v2((&mut place).into(), 16)), 900);
    assert_eq!(get(|status| cu!(cuStreamIsCapturing(stream, status))), 2);
    assert_eq!(launch(kernel, 4, stream, &[0, 0]), 901);
    assert_eq!(end(stream), (901, 0));
    // And it is over.
    allocate(16);
    begin(stream, RELAXED);
    allocate(16);
    assert_eq!(end(stream).0, 0);
}

#[test]
fn what_another_thread_may_do_depends_on_the_mode() {
    for (mode, code) in [(GLOBAL, 900), (THREAD_LOCAL, 0)] {
        let _session = Session::seeded(1);
        let stream = stream();
        begin(stream, mode);
        let answer = std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                crate::support::make_current();
                let mut place = 0;
                cu!(cuMemAlloc_v2((&mut place).into(), 16))
            });
            other.join().unwrap()
        });
        assert_eq!(answer, code);
    }
}

#[test]
fn waits_and_queries_of_captured_streams_are_refused() {
    type Call = fn(u64, u64) -> i32;
    let calls: [(Call, i32); 5] = [
        (|stream, _| cu!(cuStreamSynchronize(stream)), 900),
        (|stream, _| cu!(cuStreamQuery(stream)), 900),
        (|_, _| cu!(cuCtxSynchronize()), 900),
        (|_, event| cu!(cuEventQuery(event)), 907),
        (|_, event| cu!(cuEventSynchronize(event)), 907),
    ];
    for (call, code) in calls {
        let _session = Session::seeded(1);
        let (stream, event) = (stream(), event());
        begin(stream, RELAXED);
        ok!(cuEventRecord(event, stream));
        assert_eq!(call(stream, event), code);
        assert_eq!(end(stream), (901, 0));
    }
}

#[test]
fn captured_work_does_not_depend_on_work_outside() {
    let _session = Session::seeded(1);
    let (one, two, event) = (stream(), stream(), event());
    ok!(cuEventRecord(event, two));
    begin(one, THREAD_LOCAL);
    assert_eq!(cu!(cuStreamWaitEvent(one, event, 0)), 905);
    assert_eq!(end(one), (901, 0));
}

#[test]
fn two_captures_are_not_merged() {
    let _session = Session::seeded(1);
    let (one, two, event) = (stream(), stream(), event());
    begin(one, THREAD_LOCAL);
    begin(two, THREAD_LOCAL);
    ok!(cuEventRecord(event, one));
    assert_eq!(cu!(cuStreamWaitEvent(two, event, 0)), 902);
    assert_eq!((end(one), end(two)), ((901, 0), (901, 0)));
}

#[test]
fn the_legacy_stream_is_shut_while_a_blocking_stream_is_captured() {
    let _session = Session::seeded(1);
    let (at, kernel) = (zeros(16), write());
    let blocking = get(|handle| cu!(cuStreamCreate(handle, 0)));
    begin(blocking, RELAXED);
    assert_eq!(launch(kernel, 4, 0, &[at, 1]), 906);
    assert_eq!(end(blocking), (901, 0));
    let free = stream();
    begin(free, RELAXED);
    upload(at, &[1; 4]);
    assert_eq!(end(free).0, 0);
    assert_clean();
}
