//! Cuts a long text at places across which no token can reach. So encoding needs memory for one piece only, and can stop as
//! soon as there are too many tokens.

/// The least bytes of a piece. The library needs up to 400 bytes of memory for a byte of text (digits), so 3 MB for a
/// piece.
pub(super) const PIECE_BYTES: usize = 8 << 10;

/// The places where a tokenizer's words certainly end.
///
/// The rules hold for the pre-tokenizers that this build knows: GPT-2's pattern, with or without digits cut one by one
/// before. Its words are either a run of one kind of character (letters, numbers, others), with at most one space before
/// it, or a run of white space. So a word ends before white space, and between ASCII characters of two kinds. Only `'` may
/// begin a word of two kinds (`'s`, `'ll`).
#[derive(Debug)]
pub(super) struct Cuts {
    /// Tokens that are found in the text before it is cut into words.
    parsed_whole: Vec<Box<str>>,
    cuts_digits: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Letter,
    Digit,
    Space,
    Other,
}

fn kind(byte: u8) -> Kind {
    match byte {
        b'a'..=b'z' | b'A'..=b'Z' => Kind::Letter,
        b'0'..=b'9' => Kind::Digit,
        b'\t'..=b'\r' | b' ' => Kind::Space,
        _ => Kind::Other,
    }
}

impl Cuts {
    pub(super) fn new(parsed_whole: impl Iterator<Item = Box<str>>, cuts_digits: bool) -> Self {
        Self {
            parsed_whole: parsed_whole.collect(),
            cuts_digits,
        }
    }

    /// `text` in pieces of at least `piece_bytes`, the last one excepted. A text without a safe place to cut is one piece.
    pub(super) fn pieces<'a>(&'a self, text: &'a str, piece_bytes: usize) -> impl Iterator<Item = &'a str> {
        let mut rest = text;
        std::iter::from_fn(move || {
            let end = (piece_bytes.max(1)..rest.len())
                .find(|at| self.is_cut(rest, *at))
                .unwrap_or(rest.len());
            let (piece, after) = rest.split_at_checked(end)?;
            rest = after;
            (!piece.is_empty()).then_some(piece)
        })
    }

    fn is_cut(&self, text: &str, at: usize) -> bool {
        let (before, after) = (text.as_bytes()[at - 1], text.as_bytes()[at]);
        if !after.is_ascii() {
            return false;
        }
        let ends_word = match (kind(before), kind(after)) {
            _ if !before.is_ascii() => {
                let last = text[..at].chars().next_back();
                kind(after) == Kind::Space && last.is_some_and(|c| !c.is_whitespace())
            }
            (Kind::Space, _) => false,
            (_, Kind::Space) => true,
            (Kind::Digit, Kind::Digit) => self.cuts_digits,
            (before_kind, after_kind) => before_kind != after_kind && before != b'\'',
        };
        ends_word && !self.parsed_whole.iter().any(|token| reaches_across(text, at, token))
    }
}

/// Whether `token` occurs in `text` so that it begins before `at` and ends after it.
fn reaches_across(text: &str, at: usize, token: &str) -> bool {
    let (text, token) = (text.as_bytes(), token.as_bytes());
    let first = at.saturating_sub(token.len().saturating_sub(1));
    (first..at).any(|start| text[start..].starts_with(token))
}
