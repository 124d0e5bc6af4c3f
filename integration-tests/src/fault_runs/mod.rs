//! Longer runs under faults. T9 and the like are rows of `docs/measurements/reliability.md`: cancels (T9), deadlines (T8),
//! retries (T22), reuse of blocks and turned bits (T5), nodes killed (T6), also with many streams, nodes paused (T7),
//! coordinators killed (T11) and paused, etcd gone (T12), everything restarted in turn (T20). The runs use the rig, the
//! client and the judge of the fault matrix. `load` sends requests at a fixed rate, `judged` sums up their results, and
//! `placements` reads from the records when the coordinator used a node.

pub mod cancels;
pub mod coordinator_kills;
pub mod coordinator_pauses;
pub mod deadlines;
pub mod etcd_outages;
pub mod flips;
pub mod judged;
pub mod kills;
pub mod load;
pub mod migrate;
pub mod overload;
pub mod pauses;
pub mod placements;
pub mod retries;
pub mod reuse;
pub mod rolling;

use std::time::Duration;

/// Nearest-rank quantile.
pub fn quantile(of: &[Duration], q: f64) -> Duration {
    let mut sorted = of.to_vec();
    sorted.sort();
    let rank = (sorted.len() as f64 * q).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_that_were_seen() {
        let of: Vec<Duration> = (1..=100).rev().map(Duration::from_millis).collect();
        assert_eq!(quantile(&of, 0.5), Duration::from_millis(50));
        assert_eq!(quantile(&of, 0.99), Duration::from_millis(99));
        assert_eq!(quantile(&of, 1.0), Duration::from_millis(100));
        assert_eq!(quantile(&[], 0.5), Duration::ZERO);
    }
}
