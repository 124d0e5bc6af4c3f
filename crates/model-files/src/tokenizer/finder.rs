//! Finds many texts in one. What a finder takes is bounded by the bytes of its texts, which come from a file.

use aho_corasick::{AhoCorasick, AhoCorasickKind, MatchKind};

use super::error::TokenizerError;

/// Bytes of all texts together. Models of speech with 65,536 added tokens have less than a megabyte. A finder takes less than a hundred
/// times as much.
const TEXT_BYTES_MAX: usize = 4 << 20;
/// With more bytes than this a finder has no table. The library makes one for up to a hundred texts, whatever their length, and it takes
/// up to a kilobyte for each of their bytes.
const TABLE_TEXT_BYTES_MAX: usize = 64 << 10;

/// # Errors
/// [`TokenizerError::Build`]: the texts are too long together.
pub(super) fn finder<'a>(
    texts: impl Iterator<Item = &'a str> + Clone,
    kind: MatchKind,
) -> Result<AhoCorasick, TokenizerError> {
    let bytes: usize = texts.clone().map(str::len).sum();
    if bytes > TEXT_BYTES_MAX {
        let cause = format!("its control and added tokens have {bytes} bytes together, and may have {TEXT_BYTES_MAX}");
        return Err(TokenizerError::Build { cause: cause.into() });
    }
    let mut builder = AhoCorasick::builder();
    builder.match_kind(kind);
    if bytes > TABLE_TEXT_BYTES_MAX {
        builder.kind(Some(AhoCorasickKind::ContiguousNFA));
    }
    builder
        .build(texts)
        .map_err(|cause| TokenizerError::Build { cause: cause.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_gets_no_table() {
        let kind = |bytes: usize| {
            let text = "x".repeat(bytes);
            let built = finder([text.as_str()].into_iter(), MatchKind::Standard);
            built.expect("it is built").kind()
        };
        assert_eq!(kind(16), AhoCorasickKind::DFA);
        assert_eq!(kind(TABLE_TEXT_BYTES_MAX + 1), AhoCorasickKind::ContiguousNFA);
    }

    #[test]
    fn long_texts_are_found_and_too_long_ones_are_refused() {
        let long = "ab".repeat(50_000);
        let text = format!("é {long}");
        for kind in [MatchKind::Standard, MatchKind::LeftmostLongest] {
            let built = finder([long.as_str(), "é"].into_iter(), kind).expect("it is built");
            let places: Vec<usize> = built.find_iter(&text).map(|found| found.start()).collect();
            assert_eq!(places, [0, 3]);
        }
        let half = "x".repeat(TEXT_BYTES_MAX / 2 + 1);
        let refused = finder([half.as_str(), half.as_str()].into_iter(), MatchKind::Standard);
        assert!(matches!(refused, Err(TokenizerError::Build { .. })));
    }
}
