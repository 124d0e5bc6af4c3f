//! The tokens that the rows of a step may draw. Another thread may still work them out while the engine computes.

use std::ops::Range;
use std::sync::mpsc::Receiver;
use std::sync::{Mutex, OnceLock, PoisonError};

/// For each constrained row, one bit for each token; the form is that of [`crate::SampleInput::allowed`].
#[derive(Debug, Default)]
pub struct AllowedTokens {
    words: Vec<u32>,
    rows: Vec<(usize, Range<usize>)>,
}

impl AllowedTokens {
    pub fn push(&mut self, row: usize, words: &[u32]) {
        let start = self.words.len();
        self.words.extend_from_slice(words);
        self.rows.push((row, start..self.words.len()));
    }

    /// A row that was not pushed may draw none.
    fn of(&self, row: usize) -> &[u32] {
        let found = self.rows.iter().find(|(of, _)| *of == row);
        found.map_or(&[], |(_, words)| &self.words[words.clone()])
    }
}

/// The tokens, once they have come. The first draw waits for them.
#[derive(Debug)]
pub(crate) struct Awaited {
    come: OnceLock<AllowedTokens>,
    coming: Mutex<Option<Receiver<AllowedTokens>>>,
}

impl Awaited {
    pub fn new(coming: Receiver<AllowedTokens>) -> Self {
        Self {
            come: OnceLock::new(),
            coming: Mutex::new(Some(coming)),
        }
    }

    /// The wait ends when the other side answers or is gone. Without an answer no row may draw, so its request fails.
    pub fn of(&self, row: usize) -> &[u32] {
        let allowed = self.come.get_or_init(|| {
            let coming = self.coming.lock().unwrap_or_else(PoisonError::into_inner).take();
            coming.and_then(|coming| coming.recv().ok()).unwrap_or_default()
        });
        allowed.of(row)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use super::*;

    #[test]
    fn the_first_draw_waits_for_the_tokens_and_the_others_find_them() {
        let (sender, coming) = sync_channel(1);
        let awaited = Awaited::new(coming);
        std::thread::scope(|scope| {
            let first = scope.spawn(|| awaited.of(3).to_vec());
            let mut allowed = AllowedTokens::default();
            allowed.push(1, &[7, 8]);
            allowed.push(3, &[9]);
            sender.send(allowed).expect("it waits");
            assert_eq!(first.join().expect("no panic"), [9]);
        });
        assert_eq!((awaited.of(1), awaited.of(2)), (&[7, 8][..], &[][..]));
    }

    #[test]
    fn nothing_may_be_drawn_when_nobody_answers() {
        let (sender, coming) = sync_channel(1);
        drop(sender);
        assert!(Awaited::new(coming).of(0).is_empty());
    }
}
