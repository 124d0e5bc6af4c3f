//! An input as a list of decisions, for targets that hold a state.

/// Takes decisions from the front of an input. What is no longer there is zero.
#[derive(Debug)]
pub(crate) struct Choices<'a>(&'a [u8]);

impl<'a> Choices<'a> {
    pub(crate) fn of(data: &'a [u8]) -> Self {
        Self(data)
    }

    pub(crate) fn next(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    /// Below `count`, which is at least 1.
    pub(crate) fn below(&mut self, count: usize) -> usize {
        usize::from(self.next().unwrap_or(0)) % count.max(1)
    }

    pub(crate) fn flag(&mut self) -> bool {
        self.next().unwrap_or(0) & 1 == 1
    }

    /// What is left.
    pub(crate) fn rest(self) -> &'a [u8] {
        self.0
    }
}
