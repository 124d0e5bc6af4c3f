//! Lists and events in every order, and the difference between a member that died and an etcd that forgot.

use proptest::prelude::*;
use serving_core::ids::NodeEpoch;

use super::*;
use crate::entry::CoordinatorEntry;
use crate::entry::tests::coordinator;

const PREFIX: &str = "/baton/c/coordinators/";
const LEASE: Duration = Duration::from_secs(10);
const GRACE: Duration = Duration::from_secs(14);

/// A tracker and a clock that only the test moves.
struct Desk {
    tracker: Tracker<CoordinatorEntry>,
    now: Instant,
}

impl Desk {
    fn new() -> Self {
        let timing = TrackerTiming {
            lease: LEASE,
            vanished_grace: GRACE,
            silence: LEASE * 2 / 3,
        };
        Self {
            tracker: Tracker::new(PREFIX, timing),
            now: Instant::now(),
        }
    }

    fn listed(revision: i64, names: &[(&str, i64)]) -> Self {
        let mut desk = Self::new();
        desk.list(revision, names);
        desk
    }

    fn list(&mut self, revision: i64, names: &[(&str, i64)]) {
        let records = names.iter().map(|(name, at)| record(name, 1, *at)).collect();
        self.hear(Heard::Listed {
            revision,
            records,
            is_cut: false,
        });
    }

    fn hear(&mut self, heard: Heard) -> Vec<Skipped> {
        self.tracker.apply(self.now, heard)
    }

    fn delete(&mut self, name: &str, mod_revision: i64) {
        self.hear(Heard::Changed(vec![delete(name, mod_revision)]));
    }

    fn put(&mut self, name: &str, epoch: u64, mod_revision: i64) {
        self.hear(Heard::Changed(vec![Change::Put(record(name, epoch, mod_revision))]));
    }

    /// Time passes with etcd saying that it is there.
    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.now = (self.now + LEASE / 4).min(end);
            self.hear(Heard::Progress);
        }
    }

    /// Time passes without a word.
    fn silence(&mut self, time: Duration) {
        self.now += time;
        self.tracker.tick(self.now);
    }

    fn view(&self) -> View<CoordinatorEntry> {
        self.tracker.view(self.now)
    }

    fn members(&self) -> Vec<String> {
        self.view().members.into_keys().collect()
    }

    fn vanished(&self) -> Vec<String> {
        self.view().vanished.into_keys().collect()
    }
}

fn key(name: &str) -> Vec<u8> {
    format!("{PREFIX}{name}").into_bytes()
}

fn record(name: &str, epoch: u64, mod_revision: i64) -> KeyRecord {
    KeyRecord {
        key: key(name),
        value: coordinator(name, epoch).encode().expect("encodes"),
        mod_revision,
        lease: 1,
    }
}

fn raw(name: &str, value: &[u8], mod_revision: i64) -> Change {
    Change::Put(KeyRecord {
        key: key(name),
        value: value.to_vec(),
        mod_revision,
        lease: 0,
    })
}

fn delete(name: &str, mod_revision: i64) -> Change {
    Change::Delete {
        key: key(name),
        mod_revision,
    }
}

#[test]
fn before_the_first_list_the_view_says_that_it_knows_nothing() {
    let view = Desk::new().view();
    assert!(view.is_stale && view.as_of.is_none() && view.members.is_empty());
}

#[test]
fn a_single_members_expiry_is_told_at_once() {
    for names in [
        &[("a", 1)][..],
        &[("a", 1), ("b", 2)],
        &[("a", 1), ("b", 2), ("c", 3), ("d", 4)],
    ] {
        let mut desk = Desk::listed(9, names);
        desk.delete("a", 10);
        desk.silence(SETTLE);
        assert_eq!(desk.members().len(), names.len() - 1);
        assert!(desk.vanished().is_empty());
    }
}

#[test]
fn a_mass_loss_is_kept_for_the_grace_and_no_longer() {
    let mut desk = Desk::listed(9, &[("a", 1), ("b", 2), ("c", 3)]);
    desk.hear(Heard::Changed(vec![delete("a", 10), delete("b", 11), delete("c", 12)]));
    assert_eq!(desk.vanished(), ["a", "b", "c"]);
    desk.put("b", 1, 13);
    assert_eq!(desk.vanished(), ["a", "c"]);
    desk.pass(GRACE - Duration::from_millis(1));
    assert_eq!(desk.members(), ["a", "b", "c"]);
    desk.pass(Duration::from_millis(2));
    assert_eq!((desk.members(), desk.vanished()), (vec!["b".to_owned()], vec![]));
}

#[test]
fn a_slow_mass_loss_brings_back_those_that_were_told_as_gone() {
    let mut desk = Desk::listed(9, &[("a", 1), ("b", 2), ("c", 3), ("d", 4)]);
    desk.delete("a", 10);
    desk.pass(Duration::from_secs(3));
    desk.delete("b", 11);
    desk.pass(Duration::from_secs(3));
    assert_eq!(desk.members(), ["c", "d"]);
    desk.delete("c", 12);
    assert_eq!(desk.members(), ["a", "b", "c", "d"]);
    assert_eq!(desk.vanished(), ["a", "b", "c"]);
}

#[test]
fn losses_more_than_a_lease_apart_are_single_ones() {
    let mut desk = Desk::listed(9, &[("a", 1), ("b", 2), ("c", 3)]);
    for (name, revision) in [("a", 10), ("b", 11), ("c", 12)] {
        desk.delete(name, revision);
        desk.pass(LEASE);
        assert!(desk.vanished().is_empty());
    }
    assert!(desk.members().is_empty());
}

#[test]
fn whoever_leaves_after_a_drain_is_gone_at_once_all_of_them() {
    let mut desk = Desk::listed(9, &[("a", 1), ("b", 2)]);
    for (name, revision) in [("a", 10), ("b", 11)] {
        let mut entry = coordinator(name, 1);
        entry.state = NodeState::Draining;
        desk.hear(Heard::Changed(vec![raw(
            name,
            &entry.encode().expect("encodes"),
            revision,
        )]));
    }
    desk.hear(Heard::Changed(vec![delete("a", 12), delete("b", 13)]));
    assert!(desk.members().is_empty());
}

#[test]
fn a_loss_after_a_silence_is_etcds_even_of_one() {
    let mut desk = Desk::listed(9, &[("a", 1), ("b", 2), ("c", 3)]);
    desk.silence(LEASE * 6);
    assert!(desk.view().is_stale);
    assert_eq!(desk.members().len(), 3);
    desk.list(12, &[("a", 1), ("b", 2)]);
    assert!(!desk.view().is_stale);
    assert_eq!(desk.vanished(), ["c"]);
    // A lease later a loss is a loss again.
    desk.pass(LEASE);
    desk.delete("a", 13);
    desk.silence(SETTLE);
    assert_eq!(desk.members(), ["b", "c"]);
}

#[test]
fn an_empty_etcd_with_a_lower_revision_has_lost_its_data_even_with_one_member() {
    let mut desk = Desk::listed(9, &[("a", 5)]);
    desk.list(1, &[]);
    assert_eq!(desk.vanished(), ["a"]);
    // Its new life's revisions are low, and count.
    desk.put("a", 2, 2);
    assert!(desk.vanished().is_empty());
    assert_eq!(desk.view().members["a"].id.epoch, NodeEpoch(2));
}

#[test]
fn the_grace_does_not_run_while_etcd_is_silent() {
    let mut desk = Desk::listed(9, &[("a", 5), ("b", 6)]);
    desk.list(1, &[]);
    desk.silence(GRACE * 5);
    assert_eq!(desk.members(), ["a", "b"]);
    desk.list(2, &[]);
    desk.pass(GRACE - Duration::from_millis(1));
    assert_eq!(desk.members(), ["a", "b"]);
    desk.pass(Duration::from_millis(2));
    assert!(desk.members().is_empty());
}

#[test]
fn old_events_are_ignored_also_after_a_delete() {
    let mut desk = Desk::listed(9, &[("a", 5), ("b", 6)]);
    desk.delete("a", 8);
    assert_eq!(desk.members(), ["a", "b"], "older than the list");
    desk.put("a", 2, 12);
    desk.put("a", 1, 11);
    assert_eq!(desk.view().members["a"].id.epoch, NodeEpoch(2));
    desk.delete("a", 13);
    desk.put("a", 2, 12);
    desk.silence(SETTLE);
    assert_eq!(desk.members(), ["b"], "a replay does not bring a dead member back");
    desk.put("a", 3, 14);
    assert_eq!(desk.members(), ["a", "b"]);
}

#[test]
fn a_bad_record_is_counted_once_per_revision_and_leaves_the_last_good_one() {
    let mut desk = Desk::listed(9, &[("a", 5)]);
    let bad = raw("a", b"{", 10);
    assert_eq!(desk.hear(Heard::Changed(vec![bad.clone()])).len(), 1);
    assert!(desk.hear(Heard::Changed(vec![bad])).is_empty());
    let Change::Put(bad) = raw("a", b"{", 10) else {
        unreachable!()
    };
    let Change::Put(huge) = raw("b", &vec![b' '; 70_000], 11) else {
        unreachable!()
    };
    let list = Heard::Listed {
        revision: 12,
        records: vec![bad, huge],
        is_cut: false,
    };
    assert_eq!(desk.hear(list.clone()).len(), 1);
    assert!(desk.hear(list).is_empty());
    assert_eq!((desk.members(), desk.view().skipped), (vec!["a".to_owned()], 2));
    desk.hear(Heard::Changed(vec![raw("a", b"[", 13)]));
    assert_eq!(desk.view().skipped, 3);
    desk.put("a", 4, 14);
    assert_eq!(desk.view().members["a"].id.epoch, NodeEpoch(4));
}

#[test]
fn a_list_that_was_cut_off_takes_nobody_away() {
    let mut desk = Desk::listed(9, &[("a", 5), ("b", 6)]);
    let records = vec![record("a", 1, 5)];
    let skipped = desk.hear(Heard::Listed {
        revision: 10,
        records,
        is_cut: true,
    });
    assert_eq!((skipped.len(), desk.members().len()), (1, 2));
}

#[test]
fn who_is_missing_before_the_end_of_a_cut_list_is_gone() {
    let mut desk = Desk::listed(9, &[("a", 5), ("b", 6), ("c", 7), ("d", 8)]);
    desk.hear(Heard::Listed {
        revision: 10,
        records: vec![record("a", 1, 5), record("c", 1, 7)],
        is_cut: true,
    });
    desk.silence(SETTLE);
    assert_eq!(desk.members(), ["a", "c", "d"]);
}

#[test]
fn lists_that_are_cut_one_after_the_other_do_not_add_members_without_end() {
    let mut desk = Desk::new();
    let records = (1..MEMBERS_MAX)
        .map(|number| record(&format!("c{number}"), 1, 5))
        .collect();
    desk.hear(Heard::Listed {
        revision: 9,
        records,
        is_cut: false,
    });
    let skipped = desk.hear(Heard::Listed {
        revision: 13,
        records: vec![record("b1", 1, 10), record("b2", 1, 11), record("b3", 1, 12)],
        is_cut: true,
    });
    let members = desk.members();
    assert_eq!((skipped.len(), members.len()), (3, MEMBERS_MAX));
    assert!(members.contains(&"b1".to_owned()), "there was one place");
}

#[test]
fn the_next_call_is_due_when_something_changes_by_time_alone() {
    let mut desk = Desk::listed(9, &[("a", 1), ("b", 2), ("c", 3)]);
    assert_eq!(desk.tracker.tick(desk.now), Some(desk.now + LEASE), "stale then");
    desk.delete("a", 10);
    assert_eq!(desk.tracker.tick(desk.now), Some(desk.now + SETTLE));
}

#[derive(Clone, Debug)]
enum Write {
    Put(u8, u64),
    Delete(u8),
}

fn writes() -> impl Strategy<Value = Vec<Write>> {
    let write = prop_oneof![
        (0u8..5, 1u64..9).prop_map(|(name, epoch)| Write::Put(name, epoch)),
        (0u8..5).prop_map(Write::Delete),
    ];
    proptest::collection::vec(write, 1..40)
}

fn changes(writes: &[Write], first_revision: i64) -> (Vec<Change>, BTreeMap<String, u64>) {
    let mut truth = BTreeMap::new();
    let mut all = Vec::new();
    for (at, write) in (first_revision..).zip(writes) {
        match write {
            Write::Put(name, epoch) => {
                truth.insert(format!("n{name}"), *epoch);
                all.push(Change::Put(record(&format!("n{name}"), *epoch, at)));
            }
            Write::Delete(name) => {
                truth.remove(&format!("n{name}"));
                all.push(delete(&format!("n{name}"), at));
            }
        }
    }
    (all, truth)
}

proptest! {
    /// E4: late, twice, out of order over all keys, and in any grouping; a lost event is made good by the next list.
    #[test]
    fn any_order_of_events_ends_in_the_truth(writes in writes(), order in any::<u64>(), repeats in 1usize..3, lost in any::<u64>()) {
        let (all, truth) = changes(&writes, 2);
        let last_revision = 1 + all.len() as i64;
        let mut mixed: Vec<(u64, Change)> = (0..repeats).flat_map(|_| all.clone()).enumerate()
            .map(|(at, change)| ((at as u64 + 1).wrapping_mul(order | 1).rotate_left(17), change)).collect();
        mixed.sort_by_key(|(key, _)| *key);
        let mut desk = Desk::listed(1, &[]);
        let mut is_complete = true;
        for (at, (_, change)) in mixed.into_iter().enumerate() {
            let is_lost = repeats == 1 && lost & (1 << (at % 64)) != 0;
            is_complete &= !is_lost;
            if !is_lost {
                desk.hear(Heard::Changed(vec![change]));
            }
        }
        if !is_complete {
            let records = truth.iter().map(|(name, epoch)| record(name, *epoch, last_revision)).collect();
            desk.hear(Heard::Listed { revision: last_revision, records, is_cut: false });
        }
        desk.pass(GRACE + LEASE);
        let seen: BTreeMap<String, u64> = desk.view().members.into_iter().map(|(name, entry)| (name, entry.id.epoch.0)).collect();
        prop_assert_eq!(seen, truth);
        prop_assert!(desk.view().vanished.is_empty());
    }

    /// E1, T12: whoever was seen within the last grace is shown, if at least half of the others went with it.
    #[test]
    fn the_view_is_never_emptied_at_once(count in 2usize..12, spread_ms in 0u64..9_000, regress in any::<bool>()) {
        let names: Vec<String> = (0..count).map(|at| format!("n{at:02}")).collect();
        let listed: Vec<(&str, i64)> = names.iter().map(|name| (name.as_str(), 2)).collect();
        let mut desk = Desk::listed(50, &listed);
        if regress {
            desk.list(1, &[]);
        } else {
            for (at, name) in names.iter().enumerate() {
                desk.pass(Duration::from_millis(spread_ms / count as u64));
                desk.delete(name, 51 + at as i64);
            }
        }
        prop_assert_eq!(desk.members().len(), count);
        prop_assert_eq!(desk.vanished().len(), count);
        desk.pass(GRACE + LEASE);
        prop_assert!(desk.members().is_empty());
    }
}
