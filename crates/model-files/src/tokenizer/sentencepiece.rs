//! SentencePiece's BPE: the two neighbours whose token has the highest score merge first.
//!
//! The library's BPE with merges made from the scores, as Hugging Face's converter makes them, gives other ids in corner
//! cases: for tokens of equal score, for characters that are no token themselves but part of one, for user-defined tokens
//! behind an added space, and for unused tokens. So the merging is written here, after the description of the algorithm in
//! "SentencePiece: A simple and language independent subword tokenizer" (Kudo and Richardson, 2018) and checked against
//! that library.

use std::collections::{BinaryHeap, HashMap, HashSet};

use serving_core::ids::TokenId;

use super::added::{AddedToken, AddedTokens};
use super::cuts::{Cuts, SPACE_MARK};
use super::error::TokenizerError;
use super::special::TokenKind;
use super::splits::splits;

/// One token of a vocabulary with scores.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece<'a> {
    pub(super) text: &'a str,
    pub(super) score: f32,
    pub(super) kind: TokenKind,
}

#[derive(Debug)]
pub(super) struct SentencePiece {
    ids: HashMap<Box<str>, u32>,
    /// Indexed by id.
    scores: Vec<f32>,
    /// Tokens that merge, but are given as the two parts that they came from.
    unused: HashSet<u32>,
    user_defined: AddedTokens,
    /// Tokens of single bytes, if the vocabulary has all of them.
    bytes: Option<Box<[u32; 256]>>,
    /// For characters that are no token, where there are no byte tokens.
    unknown: Option<u32>,
    longest_bytes: usize,
    /// A space is put in front of each text.
    pub(super) adds_space: bool,
}

impl SentencePiece {
    /// # Errors
    /// A score that is not a number, a byte token that names no byte, or neither all bytes nor an unknown token.
    pub(super) fn new(
        pieces: &[Piece<'_>],
        unknown: Option<TokenId>,
        adds_space: bool,
    ) -> Result<Self, TokenizerError> {
        let mut ids: HashMap<Box<str>, u32> = HashMap::with_capacity(pieces.len());
        let mut unused = HashSet::new();
        let mut user_defined = Vec::new();
        let mut bytes = [None; 256];
        for (id, piece) in pieces.iter().enumerate() {
            if !piece.score.is_finite() {
                return Err(TokenizerError::BadScore { id });
            }
            let id = id as u32;
            // Converters write user-defined tokens with spaces, where the model has marks.
            let text = piece.text.replace(' ', SPACE_MARK.encode_utf8(&mut [0; 4]));
            match piece.kind {
                TokenKind::Normal => {}
                TokenKind::UserDefined => user_defined.push(AddedToken::plain(TokenId(id), &text)),
                TokenKind::Unused => {
                    unused.insert(id);
                }
                TokenKind::Byte => {
                    let byte = byte_of(piece.text).ok_or(TokenizerError::BadByteToken { id: id as usize })?;
                    bytes[usize::from(byte)] = Some(id);
                    continue;
                }
                TokenKind::Control | TokenKind::Unknown => continue,
            }
            ids.insert(text.into(), id);
        }
        let bytes: Option<Vec<u32>> = bytes.into_iter().collect();
        let bytes: Option<Box<[u32; 256]>> = bytes.and_then(|bytes| bytes.into_boxed_slice().try_into().ok());
        if bytes.is_none() && unknown.is_none() {
            return Err(TokenizerError::NoUnknownToken);
        }
        Ok(SentencePiece {
            longest_bytes: ids.keys().map(|text| text.len()).max().unwrap_or(0),
            ids,
            scores: pieces.iter().map(score).collect(),
            unused,
            user_defined: AddedTokens::new(user_defined)?,
            bytes,
            unknown: unknown.map(|id| id.0),
            adds_space,
        })
    }

    /// Where texts may be cut; `None` when an unused token can come from two pairs. The library then splits all its
    /// occurrences as the last one of the whole text.
    pub(super) fn cuts(&self) -> Option<Cuts> {
        let unused = self.ids.iter().filter(|(_, id)| self.unused.contains(id));
        let unused: Vec<&str> = unused.map(|(text, _)| &**text).collect();
        // A character may stand in a text whether it is a token or not.
        let ends = unused.iter().flat_map(|text| [first_of(text), last_of(text)]);
        let parts: Vec<&str> = self.ids.keys().map(|text| &**text).chain(ends).collect();
        if splits(&unused, &parts).iter().any(|places| places.len() > 1) {
            return None;
        }
        Some(Cuts::new(self.ids.keys().map(|text| &**text), self.bytes.is_none()))
    }

    /// Every token that may come from merging, with its id, in the order of ids.
    pub(super) fn mergeable(&self) -> Vec<(&str, u32)> {
        let mut all: Vec<_> = self.ids.iter().map(|(text, id)| (&**text, *id)).collect();
        all.sort_unstable_by_key(|(_, id)| *id);
        all
    }

    /// The pairs that merge, best first, as Hugging Face's converter makes them from scores.
    pub(super) fn merges(&self) -> Vec<(&str, &str)> {
        let mut merges = Vec::new();
        let tokens = self.mergeable();
        let texts: Vec<&str> = tokens.iter().map(|(text, _)| *text).collect();
        for ((text, id), places) in tokens.iter().zip(splits(&texts, &texts)) {
            let pairs = places.into_iter().map(|at| text.split_at(at));
            let known = |(left, right): (&'_ str, &'_ str)| Some((*self.ids.get(left)?, *self.ids.get(right)?));
            let mut found: Vec<_> = pairs.filter_map(|pair| Some((known(pair)?, pair))).collect();
            found.sort_unstable();
            let characters = |(left, right): (&str, &str)| (left.chars().count(), right.chars().count());
            let with_rank = |(_, pair)| (self.scores[*id as usize], characters(pair), pair);
            merges.extend(found.into_iter().map(with_rank));
        }
        // Of equal scores the longer halves come first, so that a run of spaces grows to the longest token from its left.
        merges.sort_by(|(a, a_characters, _), (b, b_characters, _)| {
            b.total_cmp(a).then_with(|| b_characters.cmp(a_characters))
        });
        merges.into_iter().map(|(_, _, pair)| pair).collect()
    }

    /// The tokens of the 256 bytes.
    pub(super) fn bytes(&self) -> Option<&[u32; 256]> {
        self.bytes.as_deref()
    }

    /// The token for characters that are no token.
    pub(super) fn unknown(&self) -> Option<TokenId> {
        self.unknown.map(TokenId)
    }

    pub(super) fn user_defined(&self) -> &[AddedToken] {
        self.user_defined.tokens()
    }

    /// Ids of `text`, of which nothing is replaced yet. `begins_fragment`: a control token or nothing stands before it.
    pub(super) fn encode(&self, text: &str, begins_fragment: bool, ids: &mut Vec<TokenId>) {
        if text.is_empty() {
            return;
        }
        let text = self.escape(text, begins_fragment);
        let mut merging = Merging::new(self, &text);
        merging.run();
        merging.give(ids);
    }

    /// Spaces become space marks.
    fn escape(&self, text: &str, begins_fragment: bool) -> String {
        let mut escaped = String::with_capacity(text.len() + text.len() / 2);
        escaped.extend((begins_fragment && self.adds_space).then_some(SPACE_MARK));
        escaped.extend(text.chars().map(|c| if c == ' ' { SPACE_MARK } else { c }));
        escaped
    }
}

/// The first character of a text; nothing of an empty one.
fn first_of(text: &str) -> &str {
    &text[..text.chars().next().map_or(0, char::len_utf8)]
}

fn last_of(text: &str) -> &str {
    &text[text.len() - text.chars().next_back().map_or(0, char::len_utf8)..]
}

/// User-defined tokens have no score of their own; llama.cpp's converter writes -1000. Both zeros are one score.
fn score(piece: &Piece<'_>) -> f32 {
    if piece.kind == TokenKind::UserDefined {
        0.0
    } else {
        piece.score + 0.0
    }
}

/// The byte that a token such as `<0x0A>` stands for.
pub(super) fn byte_of(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    let is_hex = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    is_hex.then(|| u8::from_str_radix(digits, 16).ok())?
}

/// A part of the text that is one token or will be part of one.
#[derive(Clone, Copy)]
struct Symbol {
    start: usize,
    /// Empty once it has been merged into the symbol before it.
    end: usize,
    previous: Option<usize>,
    next: Option<usize>,
    /// A user-defined token, which merges with nothing.
    is_frozen: bool,
}

/// Two neighbours that may merge. Of equal scores the leftmost is the greatest.
struct Pair {
    score: f32,
    left: usize,
    right: usize,
    bytes: usize,
}

struct Merging<'a> {
    model: &'a SentencePiece,
    text: &'a str,
    symbols: Vec<Symbol>,
    queue: BinaryHeap<Pair>,
    /// Where the text of an unused token was last joined: the length of its left part.
    origins: HashMap<&'a str, usize>,
}

impl<'a> Merging<'a> {
    fn new(model: &'a SentencePiece, text: &'a str) -> Self {
        let mut symbols = Vec::with_capacity(text.len());
        let mut add = |start, end, is_frozen| {
            let index = symbols.len();
            symbols.push(Symbol {
                start,
                end,
                previous: index.checked_sub(1),
                next: (end < text.len()).then_some(index + 1),
                is_frozen,
            });
        };
        let mut done = 0;
        let characters = |from: usize, until: usize, add: &mut dyn FnMut(usize, usize, bool)| {
            for (at, character) in text[from..until].char_indices() {
                add(from + at, from + at + character.len_utf8(), false);
            }
        };
        for (start, end) in model.user_defined.places(text) {
            characters(done, start, &mut add);
            add(start, end, true);
            done = end;
        }
        characters(done, text.len(), &mut add);
        Merging {
            model,
            text,
            queue: BinaryHeap::with_capacity(symbols.len()),
            symbols,
            origins: HashMap::new(),
        }
    }

    fn run(&mut self) {
        for right in 1..self.symbols.len() {
            self.consider(Some(right - 1), Some(right));
        }
        while let Some(pair) = self.queue.pop() {
            let (left, right) = (self.symbols[pair.left], self.symbols[pair.right]);
            let is_stale = left.start == left.end || right.start == right.end || right.end - left.start != pair.bytes;
            if is_stale {
                continue;
            }
            self.symbols[pair.left].end = right.end;
            self.symbols[pair.left].next = right.next;
            self.symbols[pair.right].end = right.start;
            if let Some(next) = right.next {
                self.symbols[next].previous = Some(pair.left);
            }
            self.consider(left.previous, Some(pair.left));
            self.consider(Some(pair.left), right.next);
        }
    }

    /// Queues two neighbours if their text is a token.
    fn consider(&mut self, left: Option<usize>, right: Option<usize>) {
        let (Some(left), Some(right)) = (left, right) else {
            return;
        };
        let (first, second) = (self.symbols[left], self.symbols[right]);
        let bytes = second.end - first.start;
        if first.is_frozen || second.is_frozen || bytes > self.model.longest_bytes {
            return;
        }
        let text = &self.text[first.start..second.end];
        let Some(&id) = self.model.ids.get(text) else { return };
        if self.model.unused.contains(&id) {
            self.origins.insert(text, first.end - first.start);
        }
        self.queue.push(Pair {
            score: self.model.scores[id as usize],
            left,
            right,
            bytes,
        });
    }

    fn give(&self, ids: &mut Vec<TokenId>) {
        let mut next = (!self.symbols.is_empty()).then_some(0);
        let mut was_unknown = false;
        // A stack instead of recursion: a hostile vocabulary may nest unused tokens deeply.
        let mut parts = Vec::new();
        while let Some(index) = next {
            let symbol = self.symbols[index];
            next = symbol.next;
            parts.push(&self.text[symbol.start..symbol.end]);
            while let Some(part) = parts.pop() {
                let id = self.model.ids.get(part);
                if let Some(id) = id
                    && self.model.unused.contains(id)
                    && let Some(&middle) = self.origins.get(part)
                {
                    let (left, right) = part.split_at(middle);
                    parts.extend([right, left]);
                    continue;
                }
                match (id, &self.model.bytes, self.model.unknown) {
                    (Some(&id), _, _) => ids.push(TokenId(id)),
                    (None, Some(bytes), _) => ids.extend(part.bytes().map(|b| TokenId(bytes[usize::from(b)]))),
                    (None, None, Some(unknown)) if !was_unknown => ids.push(TokenId(unknown)),
                    (None, None, _) => {}
                }
                was_unknown = id.is_none();
            }
        }
    }
}

impl Ord for Pair {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Pair {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Pair {}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether texts of a vocabulary of "a" and these tokens may be cut.
    fn is_cut(tokens: &[(&str, TokenKind)]) -> bool {
        let piece = |&(text, kind)| Piece { text, score: 0.0, kind };
        let first = [("<unk>", TokenKind::Unknown), ("a", TokenKind::Normal)];
        let pieces: Vec<_> = first.iter().chain(tokens).map(piece).collect();
        let model = SentencePiece::new(&pieces, Some(TokenId(0)), false).expect("is built");
        model.cuts().is_some()
    }

    #[test]
    fn texts_are_not_cut_when_an_unused_token_has_two_origins() {
        use TokenKind::{Normal, Unused};
        assert!(is_cut(&[("bc", Unused)]), "two characters, which need not be tokens");
        assert!(is_cut(&[("bcd", Unused), ("bc", Normal)]));
        assert!(!is_cut(&[("bcd", Unused), ("bc", Normal), ("cd", Normal)]));
        assert!(is_cut(&[("bcd", Normal), ("bc", Normal), ("cd", Normal)]), "it is used");
        assert!(is_cut(&[("é", Unused), ("", Normal)]));
    }

    /// Hashing both parts at each of a million places would read a million million bytes.
    #[test]
    fn the_origins_of_a_token_of_a_megabyte_are_found() {
        let long = "a".repeat(1 << 20);
        let shorter = &long[1..];
        assert!(is_cut(&[(long.as_str(), TokenKind::Unused)]));
        assert!(!is_cut(&[
            (long.as_str(), TokenKind::Unused),
            (shorter, TokenKind::Normal)
        ]));
    }
}
