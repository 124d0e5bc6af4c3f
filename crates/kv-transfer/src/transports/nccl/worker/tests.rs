//! The life of a communicator against a double of the library: deadlines, errors, aborts that hang, the next one.

use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use super::super::fault::LibraryError;
use super::*;
use crate::conformance::{eventually, within};
use crate::span::DeviceAddress;

/// What the double does.
#[derive(Clone, Debug, Default)]
struct Play {
    is_never_made: bool,
    never_runs: bool,
    fails_when_posted: bool,
    abort_hangs: bool,
    abort_fails: bool,
}

/// Both ends of the double: what was called, and what is played.
#[derive(Debug, Default)]
struct Double {
    play: Play,
    posted: Mutex<Vec<(Direction, Vec<Run>)>>,
    aborts: AtomicUsize,
    has_failed: AtomicBool,
    let_go: AtomicBool,
}

#[derive(Debug)]
struct Of(Arc<Double>);

impl Library for Of {
    fn version(&self) -> String {
        "2.28".to_owned()
    }
    fn mint(&self) -> Result<CommunicatorId, LibraryError> {
        Ok(CommunicatorId([0; 128]))
    }
    fn begin(&self, _: &CommunicatorId, _: RankOf) -> Result<Box<dyn Rank>, LibraryError> {
        Ok(Box::new(Of(self.0.clone())))
    }
}

impl Rank for Of {
    fn is_settled(&mut self) -> Result<bool, LibraryError> {
        match self.0.has_failed.load(Ordering::SeqCst) {
            true => Err("remote process exited".into()),
            false => Ok(!self.0.play.is_never_made),
        }
    }
    fn post(&mut self, direction: Direction, runs: &[Run]) -> Result<(), LibraryError> {
        self.0.posted.lock().unwrap().push((direction, runs.to_vec()));
        self.0.has_failed.store(self.0.play.fails_when_posted, Ordering::SeqCst);
        Ok(())
    }
    fn has_run(&mut self) -> Result<bool, LibraryError> {
        Ok(!self.0.play.never_runs && !self.0.play.fails_when_posted)
    }
    fn abort(self: Box<Self>) -> Result<(), LibraryError> {
        while self.0.play.abort_hangs && !self.0.let_go.load(Ordering::SeqCst) {
            std::thread::park_timeout(Duration::from_millis(1));
        }
        self.0.aborts.fetch_add(1, Ordering::SeqCst);
        match self.0.play.abort_fails {
            true => Err("unhandled system error".into()),
            false => Ok(()),
        }
    }
}

const LIMITS: DeviceLimits = DeviceLimits {
    copy_wait: Duration::from_millis(100),
    communicator_wait: Duration::from_millis(100),
    group_wait: Duration::from_millis(100),
    abort_wait: Duration::from_millis(100),
};

struct Played {
    worker: Worker,
    double: Arc<Double>,
    memory: std::sync::Weak<dyn Any + Send + Sync>,
    kept: Arc<AtomicUsize>,
}

fn started(play: Play) -> Played {
    let double = Arc::new(Double {
        play,
        ..Double::default()
    });
    let held: Arc<dyn Any + Send + Sync> = Arc::new(());
    let (memory, kept) = (Arc::downgrade(&held), Arc::new(AtomicUsize::new(0)));
    let counted = kept.clone();
    let plan = Plan {
        library: Arc::new(Of(double.clone())),
        id: CommunicatorId([0; 128]),
        rank: RankOf::Prefill,
        held,
        limits: LIMITS,
        keep: Arc::new(move |_| _ = counted.fetch_add(1, Ordering::SeqCst)),
    };
    Played {
        worker: Worker::start(plan).unwrap(),
        double,
        memory,
        kept,
    }
}

impl Played {
    async fn ready(&mut self) {
        let state = within("a state", self.worker.next_state()).await;
        assert!(matches!(state, State::Ready), "{state:?}");
    }

    async fn ended(&mut self) -> Arc<Ending> {
        match within("the end", self.worker.next_state()).await {
            State::Ended(ending) => ending,
            state => panic!("{state:?}"),
        }
    }

    async fn is_aborted(&self) {
        eventually("it is aborted, once, and its memory is free", || {
            self.double.aborts.load(Ordering::SeqCst) == 1 && self.memory.strong_count() == 0
        })
        .await;
        assert_eq!(self.kept.load(Ordering::SeqCst), 0);
    }
}

/// A communicator whose exchange never runs, and whose abort hangs and is counted as late.
async fn with_a_late_abort(play: Play) -> (Played, Running) {
    let mut played = started(Play {
        never_runs: true,
        abort_hangs: true,
        ..play
    });
    played.ready().await;
    let running = played.worker.exchange(Direction::Send, run());
    played.ended().await;
    eventually("it is counted as late", || played.kept.load(Ordering::SeqCst) == 1).await;
    (played, running)
}

/// The exchange never counts as run.
async fn is_lost(mut running: Running) {
    let over = tokio::time::timeout(Duration::from_millis(20), running.over()).await;
    assert!(over.is_err(), "{running:?}");
    assert!(!running.is_over());
}

fn run() -> Vec<Run> {
    vec![Run {
        at: DeviceAddress(64),
        bytes: 8,
    }]
}

#[tokio::test]
async fn an_exchange_is_posted_as_it_was_given_and_told_when_it_has_run() {
    let mut played = started(Play::default());
    played.ready().await;
    for _ in 0..3 {
        let mut running = played.worker.exchange(Direction::Send, run());
        within("it runs", running.over()).await;
        assert!(running.is_over());
    }
    assert_eq!(*played.double.posted.lock().unwrap(), vec![(Direction::Send, run()); 3]);
    played.worker.over.cancel();
    assert!(matches!(*played.ended().await, Ending::Closed));
    played.is_aborted().await;
}

#[tokio::test]
async fn a_communicator_that_is_never_made_ends_at_its_deadline() {
    let mut played = started(Play {
        is_never_made: true,
        ..Play::default()
    });
    assert!(matches!(*played.ended().await, Ending::NotMade { .. }));
    played.is_aborted().await;
}

#[tokio::test]
async fn a_peer_that_takes_no_part_ends_it_at_the_deadline() {
    let mut played = started(Play {
        never_runs: true,
        ..Play::default()
    });
    played.ready().await;
    let running = played.worker.exchange(Direction::Receive, run());
    assert!(matches!(*played.ended().await, Ending::Late { bytes: 8, .. }));
    is_lost(running).await;
    played.is_aborted().await;
}

#[tokio::test]
async fn an_asynchronous_error_ends_it_at_once() {
    let mut played = started(Play {
        fails_when_posted: true,
        ..Play::default()
    });
    played.ready().await;
    let running = played.worker.exchange(Direction::Send, run());
    assert!(matches!(*played.ended().await, Ending::Library(_)));
    is_lost(running).await;
    played.is_aborted().await;
}

#[tokio::test]
async fn an_abort_that_hangs_keeps_the_memory_and_the_next_communicator_works() {
    let (hung, _running) = with_a_late_abort(Play::default()).await;
    assert!(may_run(), "memory of the device must not be freed now");
    assert_eq!(hung.memory.strong_count(), 1);
    let mut next = started(Play::default());
    next.ready().await;
    within("it runs", next.worker.exchange(Direction::Send, run()).over()).await;
    hung.double.let_go.store(true, Ordering::SeqCst);
    eventually("its memory is free", || hung.memory.strong_count() == 0).await;
}

#[tokio::test]
async fn an_abort_that_fails_keeps_the_memory() {
    let mut failed = started(Play {
        never_runs: true,
        abort_fails: true,
        ..Play::default()
    });
    failed.ready().await;
    let _running = failed.worker.exchange(Direction::Receive, run());
    failed.ended().await;
    eventually("it is counted", || failed.kept.load(Ordering::SeqCst) == 1).await;
    assert_eq!(failed.double.aborts.load(Ordering::SeqCst), 1);
    assert_eq!(
        failed.memory.strong_count(),
        1,
        "an exchange that goes on may write into it"
    );
    assert!(may_run(), "memory of the device must not be freed now");
    // The double has no kernel that goes on, so other tests of this process may free theirs.
    MAY_RUN.fetch_sub(1, Ordering::SeqCst);
}

#[tokio::test]
async fn an_abort_that_is_late_and_then_fails_counts_once() {
    let (late, _running) = with_a_late_abort(Play {
        abort_fails: true,
        ..Play::default()
    })
    .await;
    late.double.let_go.store(true, Ordering::SeqCst);
    eventually("it has failed", || late.double.aborts.load(Ordering::SeqCst) == 1).await;
    // The thread drops what it has to count with when it has ended.
    eventually("the thread has ended", || Arc::strong_count(&late.kept) == 1).await;
    assert_eq!(late.kept.load(Ordering::SeqCst), 1);
    assert_eq!(late.memory.strong_count(), 1);
    // The double has no kernel that goes on, so other tests of this process may free their memory.
    MAY_RUN.fetch_sub(1, Ordering::SeqCst);
}

#[tokio::test]
async fn a_pair_that_is_gone_ends_its_communicator() {
    let played = started(Play::default());
    let Played {
        worker, double, memory, ..
    } = played;
    drop(worker);
    eventually("it is aborted", || {
        double.aborts.load(Ordering::SeqCst) == 1 && memory.strong_count() == 0
    })
    .await;
}
