//! Cuts a text into words, inside which a model merges. Words come one at a time, so no list of them is ever in memory.

use fancy_regex::Regex;

use super::error::TokenizerError;

/// Longest pattern; the longest real one (DeepSeek's) has about 700 bytes.
const PATTERN_BYTES_MAX: usize = 4 << 10;
/// Memory of one compiled part of a pattern. The longest real one takes less than 1 MiB.
const COMPILED_PART_BYTES_MAX: usize = 4 << 20;

/// GPT-2's pattern, which also stands for the `ByteLevel` pre-tokenizer.
pub(super) const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// One step of a pre-tokenizer. Each cuts the words of the step before it.
#[derive(Debug)]
pub(super) struct Split {
    separator: Separator,
    behavior: Behavior,
    /// What matches and what stands between two matches change their roles.
    is_inverted: bool,
}

#[derive(Debug)]
enum Separator {
    Pattern(Box<Regex>),
    Literal(Box<str>),
    Numeric,
}

/// What becomes of a match (`SplitDelimiterBehavior` of a tokenizer.json).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Behavior {
    Isolated,
    Removed,
    Contiguous,
    MergedWithPrevious,
    MergedWithNext,
}

/// What takes the words. An error ends the cutting.
type Sink<'a> = dyn FnMut(&str) -> Result<(), TokenizerError> + 'a;

impl Split {
    /// # Errors
    /// [`TokenizerError::BadPattern`]: the pattern is too long, too large when compiled, or no regular expression.
    pub(super) fn pattern(pattern: &str, behavior: Behavior, is_inverted: bool) -> Result<Self, TokenizerError> {
        let bad = |cause: Box<dyn std::error::Error + Send + Sync>| TokenizerError::BadPattern {
            pattern: pattern.chars().take(100).collect(),
            cause,
        };
        if pattern.len() > PATTERN_BYTES_MAX {
            return Err(bad(format!("it has more than {PATTERN_BYTES_MAX} bytes").into()));
        }
        let regex = fancy_regex::RegexBuilder::new(pattern)
            .delegate_size_limit(COMPILED_PART_BYTES_MAX)
            .build()
            .map_err(|cause| bad(cause.into()))?;
        Ok(Split {
            separator: Separator::Pattern(Box::new(regex)),
            behavior,
            is_inverted,
        })
    }

    pub(super) fn literal(literal: &str, behavior: Behavior, is_inverted: bool) -> Self {
        Split {
            separator: Separator::Literal(literal.into()),
            behavior,
            is_inverted,
        }
    }

    pub(super) fn digits(individually: bool) -> Self {
        Split {
            separator: Separator::Numeric,
            behavior: if individually {
                Behavior::Isolated
            } else {
                Behavior::Contiguous
            },
            is_inverted: false,
        }
    }

    /// The pattern whose matches are words of their own; `None` for other steps.
    pub(super) fn isolating_pattern(&self) -> Option<&str> {
        match &self.separator {
            Separator::Pattern(regex) if self.behavior == Behavior::Isolated && !self.is_inverted => {
                Some(regex.as_str())
            }
            _ => None,
        }
    }

    /// Matches in order; an error of the pattern's machine is the last item.
    fn matches<'a>(&'a self, text: &'a str) -> Box<dyn Iterator<Item = Result<(usize, usize), TokenizerError>> + 'a> {
        let place = |(start, found): (usize, &str)| Ok((start, start + found.len()));
        match &self.separator {
            Separator::Pattern(regex) => Box::new(regex.find_iter(text).map(|found| match found {
                Ok(found) => Ok((found.start(), found.end())),
                Err(cause) => Err(TokenizerError::PatternLimit { cause: cause.into() }),
            })),
            Separator::Literal(literal) => Box::new(text.match_indices(&**literal).map(place)),
            Separator::Numeric => Box::new(text.match_indices(char::is_numeric).map(place)),
        }
    }

    fn cut(&self, text: &str, sink: &mut Sink<'_>) -> Result<(), TokenizerError> {
        let mut joiner = Joiner {
            text,
            behavior: self.behavior,
            is_inverted: self.is_inverted,
            pending: None,
        };
        let mut done = 0;
        for found in self.matches(text) {
            let (start, end) = found?;
            joiner.take((done, start), false, sink)?;
            joiner.take((start, end), true, sink)?;
            done = end;
        }
        joiner.take((done, text.len()), false, sink)?;
        joiner.give_pending(sink)
    }
}

/// Gives the words of `text` to `sink`, cut by all `steps`.
///
/// # Errors
/// [`TokenizerError::PatternLimit`] and the sink's errors.
pub(super) fn cut_words(steps: &[Split], text: &str, sink: &mut Sink<'_>) -> Result<(), TokenizerError> {
    match steps.split_first() {
        None => sink(text),
        Some((first, rest)) => first.cut(text, &mut |word| cut_words(rest, word, sink)),
    }
}

/// Joins matches with what stands beside them, as the behaviour says.
struct Joiner<'a> {
    text: &'a str,
    behavior: Behavior,
    is_inverted: bool,
    /// Range and role of a word that may still grow.
    pending: Option<((usize, usize), bool)>,
}

impl Joiner<'_> {
    fn take(&mut self, range: (usize, usize), is_match: bool, sink: &mut Sink<'_>) -> Result<(), TokenizerError> {
        if range.0 >= range.1 {
            return Ok(());
        }
        let is_match = is_match != self.is_inverted;
        let grows = match (self.behavior, self.pending) {
            (Behavior::Removed, _) if is_match => return Ok(()),
            (Behavior::Isolated | Behavior::Removed, _) | (_, None) => false,
            (Behavior::Contiguous, Some((_, was_match))) => was_match == is_match,
            (Behavior::MergedWithPrevious, Some((_, was_match))) => is_match && !was_match,
            (Behavior::MergedWithNext, Some((_, was_match))) => was_match && !is_match,
        };
        match &mut self.pending {
            Some((pending, role)) if grows => {
                pending.1 = range.1;
                *role = is_match;
                Ok(())
            }
            _ => {
                self.give_pending(sink)?;
                self.pending = Some((range, is_match));
                Ok(())
            }
        }
    }

    fn give_pending(&mut self, sink: &mut Sink<'_>) -> Result<(), TokenizerError> {
        match self.pending.take() {
            Some(((start, end), _)) => sink(&self.text[start..end]),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(steps: &[Split], text: &str) -> Result<Vec<String>, TokenizerError> {
        let mut words = Vec::new();
        cut_words(steps, text, &mut |word| {
            words.push(word.to_owned());
            Ok(())
        })?;
        Ok(words)
    }

    #[test]
    fn each_behavior_joins_matches_as_the_library_does() {
        // The examples are those of the library's documentation: "the-final--countdown" cut at "-".
        for (behavior, expected) in [
            (Behavior::Removed, "the final countdown"),
            (Behavior::Isolated, "the - final - - countdown"),
            (Behavior::MergedWithPrevious, "the- final- - countdown"),
            (Behavior::MergedWithNext, "the -final - -countdown"),
            (Behavior::Contiguous, "the - final -- countdown"),
        ] {
            let found = words(&[Split::literal("-", behavior, false)], "the-final--countdown").unwrap();
            assert_eq!(found.join(" "), expected, "{behavior:?}");
        }
        let inverted = Split::pattern("[a-z]+", Behavior::Removed, true).unwrap();
        assert_eq!(words(&[inverted], "ab1cd").unwrap(), ["ab", "cd"]);
        let steps = [
            Split::digits(true),
            Split::pattern(GPT2, Behavior::Isolated, false).unwrap(),
        ];
        assert_eq!(words(&steps, "in 2026 it's").unwrap().join("|"), "in| |2|0|2|6| it|'s");
        assert_eq!(
            words(&[Split::digits(false)], "in 2026½.").unwrap().join("|"),
            "in |2026½|."
        );
    }

    #[test]
    fn a_hostile_pattern_is_a_typed_error() {
        for pattern in ["(", "(?=\\w{4000})", "(a{500}){500}{500}", &"a".repeat(5_000), "(?<"] {
            let refused = Split::pattern(pattern, Behavior::Isolated, false);
            assert!(
                matches!(refused, Err(TokenizerError::BadPattern { .. })),
                "{pattern:.20}"
            );
        }
        let exponential = Split::pattern("(?=x)x(a*)*b\\1$", Behavior::Isolated, false).unwrap();
        let text = ["x", &"a".repeat(2_000)].concat();
        let error = words(&[exponential], &text).unwrap_err();
        assert!(matches!(error, TokenizerError::PatternLimit { .. }), "{error}");
    }
}
