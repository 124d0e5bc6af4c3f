//! Owns the rules of what ended before what: points of streams, clocks that say which points are known to be over, and the seeded
//! numbers that choose an order. It never looks at the work itself.

use std::sync::Arc;

/// An operation: the `number`th that its stream was given, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Point {
    pub(crate) stream: usize,
    pub(crate) number: u64,
}

/// For each stream, up to which operation everything is known to be over.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clock(Vec<u64>);

impl Clock {
    pub(crate) fn knows(&self, point: Point) -> bool {
        self.0.get(point.stream).is_some_and(|number| *number >= point.number)
    }

    pub(crate) fn join(&mut self, other: &Clock) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            *mine = (*mine).max(*theirs);
        }
    }

    pub(crate) fn reach(&mut self, point: Point) {
        if self.0.len() <= point.stream {
            self.0.resize(point.stream + 1, 0);
        }
        self.0[point.stream] = self.0[point.stream].max(point.number);
    }
}

/// An operation, and what is over once it is over (itself included).
#[derive(Clone, Debug)]
pub(crate) struct Mark {
    pub(crate) point: Point,
    pub(crate) clock: Arc<Clock>,
}

/// Splitmix64.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn one_in(&mut self, count: u64) -> bool {
        self.draw().is_multiple_of(count)
    }

    /// `None` of an empty list.
    pub(crate) fn pick(&mut self, from: &[usize]) -> Option<usize> {
        let at = self.draw().checked_rem(from.len() as u64)?;
        from.get(at as usize).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_joined_clock_knows_what_either_knew() {
        let point = |stream, number| Point { stream, number };
        let (mut one, mut two) = (Clock::default(), Clock::default());
        one.reach(point(0, 3));
        two.reach(point(2, 5));
        one.join(&two);
        assert!(one.knows(point(0, 3)) && one.knows(point(2, 5)) && one.knows(point(2, 4)));
        assert!(!one.knows(point(0, 4)) && !one.knows(point(1, 1)) && !one.knows(point(9, 1)));
    }

    #[test]
    fn nothing_is_picked_of_an_empty_list() {
        assert_eq!(Random::new(1).pick(&[]), None);
        assert_eq!(Random::new(1).pick(&[7]), Some(7));
    }
}
