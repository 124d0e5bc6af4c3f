//! Finds control tokens that are written in a text which must not control the model.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Bound;

use aho_corasick::{AhoCorasick, MatchKind};

use super::error::TokenizerError;
use super::finder::finder;
use super::{TokenKind, TokenTable};

/// The texts of all tokens that may control a model: control tokens, and those of users, which some families have as the marks of
/// roles (`<start_of_turn>`).
pub(super) struct ControlTexts {
    finder: Option<AhoCorasick>,
    tokens: Vec<(Box<str>, TokenKind)>,
    /// The texts of control tokens alone.
    control: BTreeSet<Box<str>>,
    /// Bytes of the longest of them.
    longest: usize,
}

impl ControlTexts {
    pub(super) fn new(table: &TokenTable) -> Result<Self, TokenizerError> {
        let all = table.bytes.iter().zip(&table.kinds);
        let texts = all.filter_map(|(bytes, kind)| Some((std::str::from_utf8(bytes).ok()?, *kind)));
        // Nothing can stand inside a single character. White space marks no role: vocabularies have runs of it as tokens.
        let is_long = |text: &str| text.chars().nth(1).is_some() && !text.trim().is_empty();
        let found = texts.filter(|(text, kind)| kind.is_parsed_whole() && is_long(text));
        let tokens: Vec<(Box<str>, TokenKind)> = found.map(|(text, kind)| (text.into(), kind)).collect();
        let finder = match tokens.is_empty() {
            true => None,
            false => Some(finder(tokens.iter().map(|(text, _)| &**text), MatchKind::Standard)?),
        };
        let control = tokens.iter().filter(|(_, kind)| *kind != TokenKind::UserDefined);
        let control: BTreeSet<Box<str>> = control.map(|(text, _)| text.clone()).collect();
        Ok(Self {
            finder,
            longest: control.iter().map(|text| text.len()).max().unwrap_or(0),
            control,
            tokens,
        })
    }

    /// Whether a control token begins with the text and is longer. A text that ends so could become one with the text behind it.
    fn is_beginning(&self, text: &str) -> bool {
        // All that begin with it follow it in order, without another between them.
        let mut following = self.control.range::<str, _>((Bound::Excluded(text), Bound::Unbounded));
        following.next().is_some_and(|token| token.starts_with(text))
    }

    /// Texts of the tokens that users added.
    pub(super) fn of_users(&self) -> impl Iterator<Item = &str> {
        let of_users = self.tokens.iter().filter(|(_, kind)| *kind == TokenKind::UserDefined);
        of_users.map(|(text, _)| &**text)
    }

    /// The text with `mark` behind the first character of each control token that is written in it, also of those that overlap, and at
    /// its end where it ends like the beginning of one. A token of a user counts where `is_role_mark` says so. `None`: there is nothing.
    pub(super) fn hide(&self, text: &str, mark: char, is_role_mark: &dyn Fn(&str) -> bool) -> Option<String> {
        let found = self.finder.as_ref()?.find_overlapping_iter(text);
        let mut places: BTreeSet<usize> = found
            .filter(|found| {
                let (token, kind) = &self.tokens[found.pattern().as_usize()];
                *kind != TokenKind::UserDefined || is_role_mark(token)
            })
            .filter_map(|found| Some(found.start() + text.get(found.start()..)?.chars().next()?.len_utf8()))
            .collect();
        let from = text.len().saturating_sub(self.longest);
        let mut ends = (from..text.len()).filter_map(|start| text.get(start..));
        if ends.any(|end| self.is_beginning(end)) {
            places.insert(text.len());
        }
        if places.is_empty() {
            return None;
        }
        let mut hidden = String::with_capacity(text.len() + places.len() * mark.len_utf8());
        let mut done = 0;
        for place in places {
            hidden.push_str(&text[done..place]);
            hidden.push(mark);
            done = place;
        }
        hidden.push_str(&text[done..]);
        Some(hidden)
    }
}

impl fmt::Debug for ControlTexts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} tokens", self.tokens.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn control(tokens: &[(&str, TokenKind)]) -> ControlTexts {
        let table = TokenTable {
            bytes: tokens.iter().map(|(text, _)| text.as_bytes().into()).collect(),
            kinds: tokens.iter().map(|(_, kind)| *kind).collect(),
        };
        ControlTexts::new(&table).expect("is built")
    }

    #[test]
    fn each_control_token_is_hidden_and_nothing_else() {
        let texts = ["<|a|>", "<|a|><|b|>", "|><|", "«é»", "x"];
        let control = control(&texts.map(|text| (text, TokenKind::Control)));
        for (text, hidden) in [
            ("", None),
            ("a <|c|> and <| a|>.", None),
            ("x", None),
            ("<|a|>.", Some("<~|a|>.")),
            (".<|a|>.<|a|>.", Some(".<~|a|>.<~|a|>.")),
            ("<|a|><|b|>.", Some("<~|a|~><|b|>.")),
            ("a«é»b", Some("a«~é»b")),
            ("the end is <|a", Some("the end is <|a~")),
            ("«", Some("«~")),
        ] {
            assert_eq!(control.hide(text, '~', &|_| false).as_deref(), hidden, "{text:?}");
        }
    }

    #[test]
    fn a_users_token_is_hidden_where_it_is_the_mark_of_a_role() {
        let control = control(&[("<turn>", TokenKind::UserDefined), ("<think>", TokenKind::UserDefined)]);
        let hide = |text| control.hide(text, '~', &|token| token == "<turn>");
        assert_eq!(hide("a <turn> b <think>").as_deref(), Some("a <~turn> b <think>"));
        assert_eq!(hide("<think> <tur"), None);
        let spaces = super::ControlTexts::new(&TokenTable {
            bytes: vec![b"\n\n".as_slice().into()],
            kinds: vec![TokenKind::UserDefined],
        });
        assert_eq!(spaces.expect("is built").hide("a\n\nb", '~', &|_| true), None);
    }

    #[test]
    fn the_end_of_a_text_is_compared_with_the_beginnings_of_all_control_tokens() {
        // In order: one token is the beginning of another, and a third stands between them and what comes next.
        let control = control(&["<|", "<|end|>", "<|end|>x", "<|f", "é|é"].map(|text| (text, TokenKind::Control)));
        for beginning in ["<", "<|", "<|e", "<|end|", "<|end|>", "é", "é|"] {
            assert!(control.is_beginning(beginning), "{beginning}");
        }
        for other in ["<|end|>x", "<|end|>xy", "<|f", "<|g", "|", "e", "é|é", "ê"] {
            assert!(!control.is_beginning(other), "{other}");
        }
    }

    /// A copy of each of its beginnings would take 8 GiB.
    #[test]
    fn a_long_control_token_is_kept_once() {
        let long = "<".repeat(1 << 17);
        let control = control(&[(long.as_str(), TokenKind::Control)]);
        let kept: usize = control.control.iter().map(|text| text.len()).sum();
        assert_eq!((kept, control.longest), (long.len(), long.len()));
        assert_eq!(control.hide("a <", '~', &|_| true).as_deref(), Some("a <~"));
    }

    #[test]
    fn a_vocabulary_without_such_tokens_hides_nothing() {
        let control = control(&[("word", TokenKind::Normal)]);
        assert_eq!(control.hide("word <|a|>", '~', &|_| true), None);
    }
}
