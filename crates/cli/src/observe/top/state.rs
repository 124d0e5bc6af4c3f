//! The state of `baton top`: the cluster, the running requests, and the requests that ended in the last minute.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant, SystemTime};

use coordinator::records::pages::ClusterPage;
use coordinator::records::shape::{RecordState, Summary};

use super::watch::{Pages, Update};
use crate::observe::feed::News;

pub const WINDOW: Duration = Duration::from_secs(60);
/// The most entries of either list; the oldest go first. It is more than a screen and a percentile need.
const REQUESTS_MAX: usize = 20_000;

#[derive(Debug)]
pub struct Running {
    pub record: Summary,
    seen_at: Instant,
}

impl Running {
    /// Time since the first byte: the server's figure, and the time since it came.
    pub fn age_ms(&self, now: Instant) -> f64 {
        let since = now.saturating_duration_since(self.seen_at).as_secs_f64() * 1e3;
        self.record.e2e_ms + since
    }
}

#[derive(Debug)]
pub struct State {
    pub cluster: Option<ClusterPage>,
    pub running: BTreeMap<u64, Running>,
    ended: VecDeque<(Instant, Summary)>,
    pub missed: u64,
    pub lost_because: Option<String>,
    pub told_at: Instant,
}

impl State {
    pub fn new(now: Instant) -> Self {
        Self {
            cluster: None,
            running: BTreeMap::new(),
            ended: VecDeque::new(),
            missed: 0,
            lost_because: None,
            told_at: now,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.cluster.is_none()
    }

    pub fn apply(&mut self, update: Update, now: Instant) {
        self.told_at = now;
        match update {
            Update::Pages(pages) => self.start_over(*pages, now),
            Update::News(News::Cluster(cluster)) => self.cluster = Some(*cluster),
            Update::News(News::Request(record, _)) => self.request(*record, now),
            Update::News(News::Missed(count)) => self.missed = self.missed.saturating_add(count),
            Update::News(News::Lost(why)) => self.lost_because = Some(why),
            Update::News(News::Back) => self.lost_because = None,
            Update::News(News::Unreadable(_)) => {}
        }
        while self
            .ended
            .front()
            .is_some_and(|(at, _)| now.saturating_duration_since(*at) > WINDOW)
        {
            self.ended.pop_front();
        }
        while self.ended.len() > REQUESTS_MAX {
            self.ended.pop_front();
        }
        while self.running.len() > REQUESTS_MAX {
            self.running.pop_first();
        }
    }

    fn start_over(&mut self, pages: Pages, now: Instant) {
        self.cluster = Some(pages.cluster);
        self.missed = 0;
        let unix_ms = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs_f64() * 1e3;
        // The record does not say when the request ended. Clocks of two machines may differ, so a time in the future counts
        // as now.
        let mut ended: Vec<(Instant, Summary)> = pages
            .ended
            .into_iter()
            .filter_map(|record| {
                let age_ms = unix_ms - record.received_unix_ms - record.e2e_ms;
                let age = Duration::try_from_secs_f64(age_ms.max(0.0) / 1e3).ok()?;
                let at = now.checked_sub(age)?;
                (age <= WINDOW).then_some((at, record))
            })
            .collect();
        ended.sort_by_key(|(at, _)| *at);
        self.ended = ended.into();
        self.running.clear();
        for record in pages.running {
            self.request(record, now);
        }
    }

    fn request(&mut self, record: Summary, now: Instant) {
        let seq = record.seq;
        let is_known_as_ended = || self.ended.iter().rev().any(|(_, ended)| ended.seq == seq);
        if record.state == RecordState::Ended {
            self.running.remove(&seq);
            if !is_known_as_ended() {
                self.ended.push_back((now, record));
            }
        } else if self.running.contains_key(&seq) || !is_known_as_ended() {
            // An older event that comes after the page which already knows the end must not bring the request back.
            self.running.insert(seq, Running { record, seen_at: now });
        }
    }

    pub fn ended(&self, now: Instant) -> impl Iterator<Item = &Summary> {
        let in_window = move |at: &Instant| now.saturating_duration_since(*at) <= WINDOW;
        self.ended
            .iter()
            .filter(move |(at, _)| in_window(at))
            .map(|(_, record)| record)
    }
}

/// 50th and 99th percentile by nearest rank, and the number of samples.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Percentiles {
    pub p50: Option<f64>,
    pub p99: Option<f64>,
    pub n: usize,
}

impl Percentiles {
    pub fn of(values: impl Iterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        let n = values.len();
        let at = |percent: usize| values.get((n * percent).div_ceil(100).saturating_sub(1)).copied();
        Self {
            p50: at(50),
            p99: at(99),
            n,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn record(seq: u64, state: RecordState) -> Summary {
        Summary {
            seq,
            state,
            ..Summary::default()
        }
    }

    fn news(record: Summary) -> Update {
        Update::News(News::Request(Box::new(record), Value::Null))
    }

    #[test]
    fn percentiles_are_by_nearest_rank() {
        let of = |n: u32| Percentiles::of((1..=n).rev().map(f64::from));
        assert_eq!((of(100).p50, of(100).p99), (Some(50.0), Some(99.0)));
        assert_eq!((of(1).p50, of(1).p99, of(1).n), (Some(1.0), Some(1.0), 1));
        assert_eq!(of(0), Percentiles::default());
        assert_eq!(of(3).p99, Some(3.0));
    }

    #[test]
    fn a_request_runs_until_it_ends_and_stays_a_minute() {
        let start = Instant::now();
        let mut state = State::new(start);
        state.apply(news(record(1, RecordState::Received)), start);
        state.apply(news(record(1, RecordState::Streaming)), start);
        assert_eq!((state.running.len(), state.ended(start).count()), (1, 0));
        state.apply(news(record(1, RecordState::Ended)), start);
        state.apply(news(record(1, RecordState::Streaming)), start);
        assert_eq!((state.running.len(), state.ended(start).count()), (0, 1));
        let later = start + WINDOW + Duration::from_secs(1);
        assert_eq!(state.ended(later).count(), 0, "it is old even when nothing else comes");
        state.apply(news(record(2, RecordState::Received)), later);
        assert_eq!(state.ended.len(), 0);
    }

    #[test]
    fn pages_replace_what_was_known() {
        let start = Instant::now();
        let mut state = State::new(start);
        state.apply(news(record(1, RecordState::Streaming)), start);
        let unix_ms = SystemTime::UNIX_EPOCH.elapsed().expect("after 1970").as_secs_f64() * 1e3;
        let ended_ago = |seq: u64, seconds: f64| Summary {
            received_unix_ms: unix_ms - seconds * 1e3 - 500.0,
            e2e_ms: 500.0,
            ..record(seq, RecordState::Ended)
        };
        let pages = Pages {
            cluster: ClusterPage::default(),
            running: vec![record(7, RecordState::Queued)],
            ended: vec![
                ended_ago(6, -5.0),
                ended_ago(5, 1.0),
                ended_ago(4, 3600.0),
                ended_ago(3, 1e300),
            ],
        };
        state.apply(Update::Pages(Box::new(pages)), start);
        let seqs: Vec<u64> = state.ended(start).map(|record| record.seq).collect();
        assert_eq!(
            (seqs, state.running.keys().copied().collect::<Vec<_>>()),
            (vec![5, 6], vec![7])
        );
    }
}
