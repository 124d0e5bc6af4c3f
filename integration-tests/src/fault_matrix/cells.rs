//! The matrix as data: which fault strikes whom, and where in a request's life.

use std::fmt;

use anyhow::{Context, Result, bail};
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use rand::{Rng as _, SeedableRng as _};
use service_runtime::failpoints::FaultPoint;

const MATRIX: &str = include_str!("../../data/fault-matrix.txt");

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Victim {
    Prefill,
    Decode,
    Coordinator,
    /// Between prefill and decode nodes, over gRPC.
    Link,
    Client,
    /// What the processes find each other by.
    Etcd,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FaultKind {
    /// SIGKILL; the process is started again a second later, as a supervisor would.
    Kill,
    /// SIGSTOP for five seconds.
    Pause,
    /// RST on every connection.
    Reset,
    /// Nothing passes for six seconds.
    Blackhole,
    /// 1 KiB/s for six seconds.
    Slow,
    /// A bit in each of the next four chunks of KV.
    Flip,
    /// The connections end in the middle of the next block.
    Cut,
    /// The prefill node's direction ends, the other stays.
    HalfClose,
    /// The client drops its connection.
    Leave,
    /// The acknowledgement arrives and is not seen.
    LoseAck,
}

impl Victim {
    const NAMES: [(Self, &'static str); 6] = [
        (Self::Prefill, "prefill"),
        (Self::Decode, "decode"),
        (Self::Coordinator, "coordinator"),
        (Self::Link, "link"),
        (Self::Client, "client"),
        (Self::Etcd, "etcd"),
    ];
    pub fn name(self) -> &'static str {
        name_in(&Self::NAMES, self)
    }
}

impl FaultKind {
    const NAMES: [(Self, &'static str); 10] = [
        (Self::Kill, "kill"),
        (Self::Pause, "pause"),
        (Self::Reset, "reset"),
        (Self::Blackhole, "blackhole"),
        (Self::Slow, "slow"),
        (Self::Flip, "flip"),
        (Self::Cut, "cut"),
        (Self::HalfClose, "half-close"),
        (Self::Leave, "leave"),
        (Self::LoseAck, "lose-ack"),
    ];
    pub fn name(self) -> &'static str {
        name_in(&Self::NAMES, self)
    }
}

fn name_in<T: PartialEq>(names: &[(T, &'static str)], of: T) -> &'static str {
    names
        .iter()
        .find(|(value, _)| *value == of)
        .map_or("?", |(_, name)| name)
}

fn by_name<T: Copy>(names: &[(T, &'static str)], wanted: &str) -> Option<T> {
    names.iter().find(|(_, name)| *name == wanted).map(|(value, _)| *value)
}

/// One fault at one point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    pub victim: Victim,
    pub fault: FaultKind,
    pub point: FaultPoint,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} {} at {}",
            self.victim.name(),
            self.fault.name(),
            self.point.name()
        )
    }
}

/// Every cell, in the order of the file.
///
/// # Errors
/// A line of the file that says nothing sensible.
pub fn all() -> Result<Vec<Cell>> {
    parse(MATRIX)
}

fn parse(text: &str) -> Result<Vec<Cell>> {
    let mut cells = Vec::new();
    for (i, line) in text.lines().enumerate() {
        let mut words = line.split_whitespace();
        let Some(first) = words.next().filter(|word| !word.starts_with('#')) else {
            continue;
        };
        let of_line = || format!("line {} of the fault matrix: {line}", i + 1);
        let victim = by_name(&Victim::NAMES, first).with_context(of_line)?;
        let fault = words.next().and_then(|word| by_name(&FaultKind::NAMES, word));
        let fault = fault.with_context(of_line)?;
        let points: Vec<&str> = words.collect();
        let points = match points.as_slice() {
            [] => bail!("{} has no points", of_line()),
            ["all"] => FaultPoint::ALL.to_vec(),
            names => names
                .iter()
                .map(|name| FaultPoint::of_name(name))
                .collect::<Option<Vec<_>>>()
                .with_context(of_line)?,
        };
        cells.extend(points.into_iter().map(|point| Cell { victim, fault, point }));
    }
    Ok(cells)
}

/// `count` cells drawn by `seed`, as evenly over victims and faults as they go.
///
/// # Errors
/// As [`all`].
pub fn sample(count: usize, seed: u64) -> Result<Vec<Cell>> {
    let mut random = StdRng::seed_from_u64(seed);
    let mut left = all()?;
    left.shuffle(&mut random);
    let mut drawn: Vec<Cell> = Vec::new();
    while drawn.len() < count && !left.is_empty() {
        let uses = |cell: &Cell| {
            let same = |other: &&Cell| (other.victim, other.fault) == (cell.victim, cell.fault);
            drawn.iter().filter(same).count()
        };
        let next = (0..left.len()).min_by_key(|i| uses(&left[*i])).unwrap_or(0);
        drawn.push(left.swap_remove(next));
    }
    // Those that need a cluster of their own kind, and those that cost a whole new one, last.
    drawn.sort_by_key(|cell| {
        let is_costly = cell.victim == Victim::Coordinator && cell.fault == FaultKind::Kill;
        (cell.victim == Victim::Etcd, is_costly)
    });
    Ok(drawn)
}

impl Cell {
    /// How many passages of its point go by first: the fault strikes another request, or another moment, each time.
    pub fn passages(&self, random: &mut StdRng) -> u32 {
        let most = match self.point {
            // One a token, four requests on a node: somewhere in the answers.
            FaultPoint::MidDecode => 40,
            FaultPoint::MidChunk | FaultPoint::Queued | FaultPoint::FirstTokenUnflushed => 4,
            // At least two requests on each node.
            _ => 2,
        };
        random.random_range(0..most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_has_every_point_under_every_kind_of_death() {
        let cells = all().expect("the file");
        for point in FaultPoint::ALL {
            for victim in [Victim::Prefill, Victim::Decode, Victim::Coordinator, Victim::Etcd] {
                for fault in [FaultKind::Kill, FaultKind::Pause] {
                    assert!(
                        cells.contains(&Cell { victim, fault, point }),
                        "{}",
                        Cell { victim, fault, point }
                    );
                }
            }
        }
        for fault in FaultKind::NAMES {
            assert!(cells.iter().any(|cell| cell.fault == fault.0), "{}", fault.1);
        }
    }

    #[test]
    fn a_word_that_means_nothing_is_an_error_and_not_an_empty_cell() {
        for line in [
            "link explode queued",
            "nobody kill all",
            "link reset nowhere",
            "link reset",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }

    #[test]
    fn a_sample_is_the_same_for_the_same_seed_and_has_every_fault_once_before_any_twice() {
        let kinds: std::collections::BTreeSet<_> = all()
            .expect("cells")
            .iter()
            .map(|cell| (cell.victim, cell.fault))
            .collect();
        let drawn = sample(kinds.len(), 5).expect("cells");
        assert_eq!(drawn, sample(kinds.len(), 5).expect("cells"));
        let of_sample: std::collections::BTreeSet<_> = drawn.iter().map(|cell| (cell.victim, cell.fault)).collect();
        assert_eq!(of_sample, kinds);
    }
}
