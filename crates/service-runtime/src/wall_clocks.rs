//! The wall clocks of a node's coordinators, each less this process's. A node keeps its spans on the clock of one of them, the
//! reference. A coordinator that asks for a trace gets it on its own clock.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use proto::messages::ClockOffset;
use serving_core::ids::NodeEpoch;

#[derive(Debug)]
struct WallClocks {
    /// `None` on a coordinator.
    reference: Option<ClockOffset>,
    /// Those that are connected.
    by_coordinator: BTreeMap<NodeEpoch, ClockOffset>,
}

static CLOCKS: Mutex<WallClocks> = Mutex::new(WallClocks {
    reference: None,
    by_coordinator: BTreeMap::new(),
});

fn clocks() -> MutexGuard<'static, WallClocks> {
    CLOCKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on spans are kept on this clock.
pub(crate) fn set_reference(offset: ClockOffset) {
    clocks().reference = Some(offset);
}

pub(crate) fn reference() -> Option<ClockOffset> {
    clocks().reference
}

pub(crate) fn note(coordinator: NodeEpoch, offset: ClockOffset) {
    clocks().by_coordinator.insert(coordinator, offset);
}

/// The coordinator is no longer connected.
pub(crate) fn forget(coordinator: NodeEpoch) {
    clocks().by_coordinator.remove(&coordinator);
}

/// What to add to times on the reference's clock for those on a coordinator's. `None`: nothing, or nothing is known.
pub(crate) fn from_reference_to(coordinator: NodeEpoch) -> Option<ClockOffset> {
    let clocks = clocks();
    let to = clocks.by_coordinator.get(&coordinator)?;
    difference(clocks.reference?, *to)
}

/// Two offsets of one clock differ by their errors. Then the times stay as they are.
fn difference(from: ClockOffset, to: ClockOffset) -> Option<ClockOffset> {
    let error = from.error.saturating_add(to.error);
    let unix_ns = to.unix_ns.saturating_sub(from.unix_ns);
    let monotonic_ns = to.monotonic_ns.saturating_sub(from.monotonic_ns);
    let is_another_clock = u128::from(unix_ns.unsigned_abs()) > error.as_nanos();
    is_another_clock.then_some(ClockOffset {
        monotonic_ns,
        unix_ns,
        error,
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn offset(unix_ns: i64) -> ClockOffset {
        ClockOffset {
            monotonic_ns: 0,
            unix_ns,
            error: Duration::from_nanos(100),
        }
    }

    #[test]
    fn times_move_between_two_clocks_by_what_their_errors_do_not_explain() {
        let by = difference(offset(5_000), offset(-2_000)).expect("two clocks");
        assert_eq!((by.unix_ns, by.error), (-7_000, Duration::from_nanos(200)));
        assert_eq!(
            difference(offset(5_000), offset(5_200)),
            None,
            "two readings of one clock"
        );
        assert!(difference(offset(i64::MIN), offset(i64::MAX)).is_some());
    }
}
