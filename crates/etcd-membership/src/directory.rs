//! The registered members, kept up to date by a task of its own: a thin shell around `tracker.rs`.

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use crate::address::EtcdAddress;
use crate::back_off::BACK_OFF_MAX;
use crate::entry::Entry;
use crate::registration::LEASE_TTL_MIN;
use crate::source::{News, Source, SourceTiming};
use crate::tracker::{Skipped, Tracker, TrackerTiming};
use crate::view::View;

/// News that wait for the loop. The loop itself never waits. When the queue is full the watch stands still.
const NEWS_QUEUED_MAX: usize = 64;
/// A silence of two thirds of a lease. A member that renewed a third of a lease before the silence may have lost its lease
/// in it.
const SILENCE_PER_LEASE: f64 = 2.0 / 3.0;
/// Two answers may be late before that.
const PROGRESS_PER_LEASE: u32 = 4;
/// A list more often than this is a mistake in a setting.
const RELIST_INTERVAL_MIN: Duration = Duration::from_secs(1);
const CALL_LIMIT_MAX: Duration = Duration::from_secs(5);
/// Lines about skipped records within so much time: whoever may write to etcd could fill the log otherwise. A cluster that is upgraded has
/// some such records for a while.
const SKIPS_TOLD_MAX: u32 = 16;
const SKIPS_TOLD_WITHIN: Duration = Duration::from_secs(10);

#[derive(Clone, Debug)]
pub struct DirectoryConfig {
    /// The TTL with which the members register.
    pub lease_ttl: Duration,
    /// How long members are kept whose entries vanished because of etcd.
    pub vanished_grace: Duration,
    /// How often the list is read again although the watch is healthy. Jittered by half.
    pub relist_interval: Duration,
}

impl DirectoryConfig {
    /// etcd's known cases of lost events were one in hours of fault tests. That costs a few minutes of a wrong view, which
    /// the status streams make good. A list is a few kilobytes for each process.
    pub const RELIST_INTERVAL: Duration = Duration::from_secs(300);

    /// The grace period: one lease, for members that notice at their next renewal, and twice the longest back-off, for
    /// members that find etcd still starting.
    pub fn for_lease(lease_ttl: Duration) -> Self {
        Self {
            lease_ttl,
            vanished_grace: lease_ttl + BACK_OFF_MAX * 2,
            relist_interval: Self::RELIST_INTERVAL,
        }
    }
}

/// The nodes or the coordinators of a cluster. Dropping it stops the task.
#[derive(Debug)]
pub struct Directory<T> {
    view: watch::Receiver<View<T>>,
    tasks: [JoinHandle<()>; 2],
    _entries: PhantomData<T>,
}

impl<T: Entry> Directory<T> {
    /// Starts the task on the current Tokio runtime.
    pub fn start(address: EtcdAddress, config: DirectoryConfig) -> Self {
        let prefix = address.prefix(T::FOLDER);
        let lease = config.lease_ttl.max(LEASE_TTL_MIN);
        let silence = lease.mul_f64(SILENCE_PER_LEASE);
        let tracker = Tracker::new(
            &prefix,
            TrackerTiming {
                lease,
                vanished_grace: config.vanished_grace,
                silence,
            },
        );
        let (view_in, view) = watch::channel(tracker.view(Instant::now()));
        let (news_in, news) = mpsc::channel(NEWS_QUEUED_MAX);
        let source = Source {
            address,
            prefix,
            timing: SourceTiming {
                call_limit: silence.min(CALL_LIMIT_MAX),
                progress_interval: lease / PROGRESS_PER_LEASE,
                silence,
                relist_interval: config.relist_interval.max(RELIST_INTERVAL_MIN),
            },
            news: news_in,
        };
        let tasks = [tokio::spawn(source.run()), tokio::spawn(follow(tracker, news, view_in))];
        Self {
            view,
            tasks,
            _entries: PhantomData,
        }
    }

    pub fn view(&self) -> watch::Receiver<View<T>> {
        self.view.clone()
    }
}

impl<T> Drop for Directory<T> {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

async fn follow<T: Entry>(mut tracker: Tracker<T>, mut news: mpsc::Receiver<News>, view: watch::Sender<View<T>>) {
    let mut skips = SkipLog::default();
    loop {
        let next = tracker.tick(Instant::now());
        publish(&view, tracker.view(Instant::now()));
        let next_tick = async {
            match next {
                Some(at) => tokio::time::sleep_until(at.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            item = news.recv() => match item {
                Some(Ok(heard)) => {
                    let now = Instant::now();
                    skips.tell(now, &tracker.apply(now, heard));
                }
                Some(Err(trouble)) => tracker.fail(trouble),
                None => return,
            },
            () = next_tick => {}
        }
    }
}

/// Nobody is woken for a view that has only become younger.
fn publish<T: Entry>(view: &watch::Sender<View<T>>, next: View<T>) {
    view.send_if_modified(|known| {
        let as_of = next.as_of;
        let is_news = *known
            != View {
                as_of: known.as_of,
                ..next.clone()
            };
        if is_news {
            log_changes(known, &next);
            *known = next;
        }
        known.as_of = as_of;
        is_news
    });
}

/// Says which records are skipped. The view counts all of them.
#[derive(Debug, Default)]
struct SkipLog {
    since: Option<Instant>,
    told: u32,
    untold: u64,
}

impl SkipLog {
    fn tell(&mut self, now: Instant, skipped: &[Skipped]) {
        for Skipped { key, why } in skipped {
            match self.has_room(now) {
                true => {
                    let untold = std::mem::take(&mut self.untold);
                    tracing::warn!(key, %why, untold, "skipped a record in etcd that is not understood");
                }
                false => self.untold += 1,
            }
        }
    }

    /// Whether another line may be written.
    fn has_room(&mut self, now: Instant) -> bool {
        let is_over = |since: Instant| now.saturating_duration_since(since) >= SKIPS_TOLD_WITHIN;
        if self.since.is_none_or(is_over) {
            (self.since, self.told) = (Some(now), 0);
        }
        let has_room = self.told < SKIPS_TOLD_MAX;
        self.told += u32::from(has_room);
        has_room
    }
}

fn log_changes<T: Entry>(old: &View<T>, new: &View<T>) {
    let folder = T::FOLDER;
    let lacks = |map: &BTreeMap<String, T>, name: &String| !map.contains_key(name);
    for name in new.members.keys().filter(|name| lacks(&old.members, name)) {
        tracing::info!(folder, name, "registered in etcd");
    }
    for name in old.members.keys().filter(|name| lacks(&new.members, name)) {
        tracing::info!(folder, name, "no longer registered in etcd");
    }
    if old.vanished.is_empty() && !new.vanished.is_empty() {
        let count = new.vanished.len();
        tracing::warn!(
            folder,
            count,
            "entries vanished from etcd together, or after an outage; their members are kept for now"
        );
    }
    match (&old.trouble, &new.trouble) {
        (known, Some(why)) if why.is_for_a_person() && known.as_ref() != Some(why) => {
            tracing::error!(folder, %why, "cannot read the records in etcd; trying again for ever");
        }
        // Before the first answer there is no view, and the registration tells of the silence.
        (None, Some(why)) if new.as_of.is_some() => {
            tracing::warn!(folder, %why, "etcd is away; the last view stays");
        }
        (Some(_), None) if old.as_of.is_some() => tracing::info!(folder, "etcd is back"),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entry::BadRecord;

    #[test]
    fn a_flood_of_bad_records_fills_no_log_and_is_counted() {
        let skipped = vec![
            Skipped {
                key: "k".to_owned(),
                why: BadRecord::UnknownSchema { got: 2 },
            };
            1_000
        ];
        let (mut skips, start) = (SkipLog::default(), Instant::now());
        skips.tell(start, &skipped);
        assert_eq!((skips.told, skips.untold), (SKIPS_TOLD_MAX, 984));
        skips.tell(start + SKIPS_TOLD_WITHIN / 2, &skipped);
        assert_eq!((skips.told, skips.untold), (SKIPS_TOLD_MAX, 1_984));
        skips.tell(start + SKIPS_TOLD_WITHIN, &skipped[..1]);
        assert_eq!(
            (skips.told, skips.untold),
            (1, 0),
            "the next line says how many were not told"
        );
    }
}
