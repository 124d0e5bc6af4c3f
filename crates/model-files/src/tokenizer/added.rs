//! Tokens that are found in a text before it is cut into words: control tokens and tokens that a user added.

use std::fmt;

use aho_corasick::{AhoCorasick, MatchKind};
use serving_core::ids::TokenId;

use super::error::TokenizerError;
use super::finder::finder;

/// One token, and what it does to the text around it (the fields of `added_tokens` in a tokenizer.json).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AddedToken {
    pub(super) id: TokenId,
    pub(super) text: String,
    /// White space before the token is part of it.
    pub(super) strips_left: bool,
    /// White space after the token is part of it.
    pub(super) strips_right: bool,
    /// Only found where no letter, digit or underscore touches it.
    pub(super) is_single_word: bool,
}

impl AddedToken {
    pub(super) fn plain(id: TokenId, text: &str) -> Self {
        AddedToken {
            id,
            text: text.to_owned(),
            strips_left: false,
            strips_right: false,
            is_single_word: false,
        }
    }
}

/// Finds added tokens: the leftmost first, and the longest of those that begin at one place.
pub(super) struct AddedTokens {
    finder: Option<AhoCorasick>,
    tokens: Vec<AddedToken>,
}

/// A part of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fragment<'a> {
    Token(TokenId),
    /// Never empty. `is_start` says that the text begins here.
    Text {
        text: &'a str,
        is_start: bool,
    },
}

impl AddedTokens {
    /// Tokens without text are never found, so they are left out.
    pub(super) fn new(tokens: impl IntoIterator<Item = AddedToken>) -> Result<Self, TokenizerError> {
        let tokens: Vec<_> = tokens.into_iter().filter(|token| !token.text.is_empty()).collect();
        let finder = if tokens.is_empty() {
            None
        } else {
            let texts = tokens.iter().map(|token| token.text.as_str());
            Some(finder(texts, MatchKind::LeftmostLongest)?)
        };
        Ok(AddedTokens { finder, tokens })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    pub(super) fn tokens(&self) -> &[AddedToken] {
        &self.tokens
    }

    /// The places of the tokens, byte ranges without the white space around them. User-defined tokens of SentencePiece
    /// are looked up by place.
    pub(super) fn places<'a>(&'a self, text: &'a str) -> impl Iterator<Item = (usize, usize)> + 'a {
        let matches = self.finder.iter().flat_map(|finder| finder.find_iter(text.as_bytes()));
        matches.map(|found| (found.start(), found.end()))
    }

    /// Tokens and the text between them, in order.
    pub(super) fn fragments<'a>(&'a self, text: &'a str) -> impl Iterator<Item = Fragment<'a>> + 'a {
        let mut matches = self.finder.iter().flat_map(|finder| finder.find_iter(text.as_bytes()));
        let mut done = 0;
        // The end of the white space that an earlier token took. Up to here it need not be read again.
        let mut white_until = 0;
        let mut next_token = None;
        let mut is_over = false;
        std::iter::from_fn(move || {
            if let Some(id) = next_token.take() {
                return Some(Fragment::Token(id));
            }
            while !is_over {
                let token = matches
                    .by_ref()
                    .find_map(|found| self.place(text, (done, white_until), found));
                let from = done;
                let (until, after) = match token {
                    Some((id, start, end)) => {
                        next_token = Some(id);
                        white_until = white_until.max(end);
                        (start, end)
                    }
                    None => {
                        is_over = true;
                        (text.len(), text.len())
                    }
                };
                done = after;
                if from < until {
                    let (text, is_start) = (&text[from..until], from == 0);
                    return Some(Fragment::Text { text, is_start });
                }
                if let Some(id) = next_token.take() {
                    return Some(Fragment::Token(id));
                }
            }
            None
        })
    }

    /// Where a match begins and ends with the white space that belongs to it; `None` for a part of a word.
    fn place(
        &self,
        text: &str,
        (done, white_until): (usize, usize),
        found: aho_corasick::Match,
    ) -> Option<(TokenId, usize, usize)> {
        let token = self.tokens.get(found.pattern().as_usize())?;
        let (before, after) = (&text[..found.start()], &text[found.end()..]);
        if token.is_single_word && (before.ends_with(is_word) || after.starts_with(is_word)) {
            return None;
        }
        // Nothing is looked at twice: a token may be white space itself, in a long run of it.
        let start = if token.strips_left {
            let between = &text[done.min(found.start())..found.start()];
            (found.start() - between.len() + between.trim_end().len()).max(done)
        } else {
            found.start()
        };
        let end = if token.strips_right {
            let from = found.end().max(white_until);
            text.len() - text[from..].trim_start().len()
        } else {
            found.end()
        };
        Some((token.id, start, end))
    }
}

/// Nearly the class `\w` of regular expressions: it lacks marks that are not letters.
fn is_word(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

impl fmt::Debug for AddedTokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.tokens).finish()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn fragments(tokens: &AddedTokens, text: &str) -> String {
        let shown = tokens.fragments(text).map(|fragment| match fragment {
            Fragment::Token(id) => format!("[{}]", id.0),
            Fragment::Text { text, is_start } => format!("({}{text})", if is_start { "^" } else { "" }),
        });
        shown.collect()
    }

    #[test]
    fn tokens_take_the_white_space_that_belongs_to_them() {
        let mut left = AddedToken::plain(TokenId(1), "<l>");
        left.strips_left = true;
        let mut right = AddedToken::plain(TokenId(2), "<r>");
        right.strips_right = true;
        let mut word = AddedToken::plain(TokenId(3), "word");
        word.is_single_word = true;
        let longer = AddedToken::plain(TokenId(4), "<l><r>");
        let empty = AddedToken::plain(TokenId(5), "");
        let tokens = AddedTokens::new([left, right, word, longer, empty]).unwrap();
        for (text, expected) in [
            ("", ""),
            ("plain", "(^plain)"),
            ("a  <l>  b", "(^a)[1](  b)"),
            ("a <r> \n b", "(^a )[2](b)"),
            ("<l><r><l>", "[4][1]"),
            ("<r> <r>", "[2][2]"),
            ("<r>  <l> x", "[2][1]( x)"),
            ("word words _word word.", "[3]( words _word )[3](.)"),
        ] {
            assert_eq!(fragments(&tokens, text), expected, "{text:?}");
        }
    }

    /// Where the library finds tokens: it looks at all the white space beside each.
    fn simple(tokens: &AddedTokens, text: &str) -> String {
        let (mut shown, mut done) = (String::new(), 0);
        let part = |from: usize, until: usize| match &text[from..until] {
            "" => String::new(),
            part => format!("({}{part})", if from == 0 { "^" } else { "" }),
        };
        for found in tokens.finder.iter().flat_map(|finder| finder.find_iter(text)) {
            let token = &tokens.tokens[found.pattern().as_usize()];
            let (before, after) = (&text[..found.start()], &text[found.end()..]);
            if token.is_single_word && (before.ends_with(is_word) || after.starts_with(is_word)) {
                continue;
            }
            let start = match token.strips_left {
                true => before.trim_end().len().max(done),
                false => found.start(),
            };
            shown += &part(done, start.max(done));
            shown += &format!("[{}]", token.id.0);
            done = match token.strips_right {
                true => text.len() - after.trim_start().len(),
                false => found.end(),
            };
        }
        shown + &part(done, text.len())
    }

    /// The four texts with each combination of what they do to the text around them.
    fn tokens_that_strip(settings: u16) -> AddedTokens {
        let texts = ["<", " ", "\n", "ab"];
        let token = |(place, text): (u32, &str)| {
            let is_set = |bit: u32| settings & (1 << (3 * place + bit)) != 0;
            AddedToken {
                strips_left: is_set(0),
                strips_right: is_set(1),
                is_single_word: is_set(2),
                ..AddedToken::plain(TokenId(place), text)
            }
        };
        AddedTokens::new((0..).zip(texts).map(token)).unwrap()
    }

    proptest! {
        #[test]
        fn tokens_are_found_where_the_library_finds_them(settings in 0u16..1 << 12, text in "[<ab \n\u{2003}]{0,12}") {
            let tokens = tokens_that_strip(settings);
            prop_assert_eq!(fragments(&tokens, &text), simple(&tokens, &text));
        }
    }

    /// Looking at the whole run for each of its tokens takes a million million steps.
    #[test]
    fn a_long_run_of_tokens_that_are_white_space_is_read_once() {
        let mut newline = AddedToken::plain(TokenId(1), "\n");
        (newline.strips_left, newline.strips_right) = (true, true);
        let tokens = AddedTokens::new([newline, AddedToken::plain(TokenId(2), "\t")]).unwrap();
        let text = "\n\t".repeat(1 << 19);
        let found = tokens.fragments(&text);
        let count = found
            .filter(|fragment| *fragment == Fragment::Token(TokenId(1)))
            .count();
        assert_eq!(count, text.len() / 2);
    }
}
