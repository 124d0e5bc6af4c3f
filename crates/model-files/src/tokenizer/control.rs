//! Finds control tokens that are written in a text which must not control the model.

use std::collections::BTreeSet;
use std::fmt;

use super::error::TokenizerError;
use super::finder::{Beginnings, Starts};
use super::{TokenKind, TokenTable};

/// The texts of all control tokens.
pub(super) struct ControlTexts {
    starts: Starts,
    beginnings: Beginnings,
}

/// Tokens that somebody added to the vocabulary as plain text, and that control the model: the marks of roles of some families
/// (`<start_of_turn>`).
pub struct RoleMarks {
    starts: Starts,
}

/// Text and kind of all tokens that may control a model: control tokens, and those of users.
fn controlling(table: &TokenTable) -> impl Iterator<Item = (&str, TokenKind)> {
    let all = table.bytes.iter().zip(&table.kinds);
    let texts = all.filter_map(|(bytes, kind)| Some((std::str::from_utf8(bytes).ok()?, *kind)));
    // Nothing can stand inside a single character. White space marks no role: vocabularies have runs of it as tokens.
    let is_long = |text: &str| text.chars().nth(1).is_some() && !text.trim().is_empty();
    texts.filter(move |(text, kind)| kind.is_parsed_whole() && is_long(text))
}

impl RoleMarks {
    pub(super) fn new(table: &TokenTable, is_role_mark: &dyn Fn(&str) -> bool) -> Result<Self, TokenizerError> {
        let of_users = controlling(table).filter(|(_, kind)| *kind == TokenKind::UserDefined);
        let marks = of_users.map(|(text, _)| text).filter(|text| is_role_mark(text));
        Ok(Self {
            starts: Starts::new(marks.collect())?,
        })
    }
}

impl ControlTexts {
    pub(super) fn new(table: &TokenTable) -> Result<Self, TokenizerError> {
        let control = controlling(table).filter(|(_, kind)| *kind != TokenKind::UserDefined);
        let control: Vec<&str> = control.map(|(text, _)| text).collect();
        Ok(Self {
            beginnings: Beginnings::new(&control)?,
            starts: Starts::new(control)?,
        })
    }

    /// The text with `mark` behind the first character of each control token and each mark of a role that is written in it, also of those
    /// that overlap, and at its end where it ends like the beginning of a control token: it could become one with the text behind it.
    /// `None`: there is nothing.
    pub(super) fn hide(&self, text: &str, mark: char, role_marks: Option<&RoleMarks>) -> Option<String> {
        let of_roles = role_marks.into_iter().flat_map(|marks| marks.starts.places(text));
        let starts = self.starts.places(text).chain(of_roles);
        let behind_first = |start: usize| Some(start + text.get(start..)?.chars().next()?.len_utf8());
        let mut places: BTreeSet<usize> = starts.filter_map(behind_first).collect();
        if self.beginnings.is_at_end_of(text) {
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

impl fmt::Debug for RoleMarks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RoleMarks").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn table(tokens: &[(&str, TokenKind)]) -> TokenTable {
        TokenTable {
            bytes: tokens.iter().map(|(text, _)| text.as_bytes().into()).collect(),
            kinds: tokens.iter().map(|(_, kind)| *kind).collect(),
        }
    }

    fn control(tokens: &[(&str, TokenKind)]) -> ControlTexts {
        ControlTexts::new(&table(tokens)).expect("is built")
    }

    /// The definition of what is hidden, in the order of places.
    fn simple(tokens: &[(&str, TokenKind)], text: &str, is_role_mark: &dyn Fn(&str) -> bool) -> Option<String> {
        let is_user = |kind: TokenKind| kind == TokenKind::UserDefined;
        let counts = |(token, kind): &&(&str, TokenKind)| !is_user(*kind) || is_role_mark(token);
        let starts = |at: usize| {
            tokens
                .iter()
                .filter(counts)
                .any(|(token, _)| text[at..].starts_with(token))
        };
        let is_beginning = |end: &str| {
            let mut control = tokens.iter().filter(|(_, kind)| !is_user(*kind));
            control.any(|(token, _)| token.len() > end.len() && token.starts_with(end))
        };
        let ends_so = text.char_indices().any(|(at, _)| is_beginning(&text[at..]));
        let mut hidden = String::new();
        for (at, character) in text.char_indices() {
            hidden.push(character);
            let is_last = at + character.len_utf8() == text.len();
            if starts(at) || (is_last && ends_so) {
                hidden.push('~');
            }
        }
        (hidden != text).then_some(hidden)
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
            assert_eq!(control.hide(text, '~', None).as_deref(), hidden, "{text:?}");
        }
    }

    #[test]
    fn a_users_token_is_hidden_where_it_is_the_mark_of_a_role() {
        let tokens = [
            ("<turn>", TokenKind::UserDefined),
            ("<think>", TokenKind::UserDefined),
            ("\n\n", TokenKind::UserDefined),
        ];
        let control = control(&tokens);
        let turn = RoleMarks::new(&table(&tokens), &|token| token == "<turn>").expect("is built");
        let hide = |text| control.hide(text, '~', Some(&turn));
        assert_eq!(hide("a <turn> b <think>").as_deref(), Some("a <~turn> b <think>"));
        assert_eq!(hide("<think> <tur"), None);
        let all = RoleMarks::new(&table(&tokens), &|_| true).expect("is built");
        assert_eq!(control.hide("a\n\nb", '~', Some(&all)), None);
    }

    #[test]
    fn the_end_of_a_text_is_compared_with_the_beginnings_of_all_control_tokens() {
        // In order: one token is the beginning of another, and a third stands between them and what comes next.
        let control = control(&["<|", "<|end|>", "<|end|>x", "<|f", "é|é"].map(|text| (text, TokenKind::Control)));
        for beginning in ["<", "<|", "<|e", "<|end|", "<|end|>", "é", "é|", "é|é", ".<|e", "<<"] {
            assert!(control.beginnings.is_at_end_of(beginning), "{beginning}");
        }
        for other in ["", "<|end|>x", "<|end|>xy", "<|f", "<|g", "|", "e", "ê", "<.", "é."] {
            assert!(!control.beginnings.is_at_end_of(other), "{other}");
        }
    }

    /// Each of them at each place would be a thousand million finds, and a list of all that end in each state 4 GB.
    #[test]
    fn tokens_that_nest_a_thousand_times_are_found_once_at_a_place() {
        let long = "a".repeat(1 << 18);
        let lengths = (2..2_000).chain([long.len()]);
        let text = "a".repeat(1 << 19);
        let hidden = "a~".repeat(text.len());
        for kind in [TokenKind::Control, TokenKind::UserDefined] {
            let tokens: Vec<_> = lengths.clone().map(|length| (&long[..length], kind)).collect();
            let marks = RoleMarks::new(&table(&tokens), &|_| true).expect("is built");
            let found = control(&tokens)
                .hide(&text, '~', Some(&marks))
                .expect("there is something");
            // Behind the last character only what could go on is hidden, and that is a matter of control tokens.
            let expected = hidden.strip_suffix('~').filter(|_| kind == TokenKind::UserDefined);
            assert!(found == expected.unwrap_or(&hidden), "{kind:?}");
        }
    }

    /// Comparing each end of the text with the token would read a million million bytes.
    #[test]
    fn the_end_of_a_text_is_compared_with_a_token_of_a_megabyte() {
        let long = "a".repeat(1 << 20);
        let token = format!("{long}b");
        let control = control(&[(token.as_str(), TokenKind::Control)]);
        assert_eq!(control.hide(&format!("{long}c"), '~', None), None);
        assert!(
            control
                .hide(&long, '~', None)
                .is_some_and(|hidden| hidden.ends_with("a~"))
        );
    }

    #[test]
    fn a_vocabulary_without_such_tokens_hides_nothing() {
        let control = control(&[("word", TokenKind::Normal)]);
        assert_eq!(control.hide("word <|a|>", '~', None), None);
    }

    proptest! {
        #[test]
        fn what_is_hidden_is_that_of_the_definition(
            texts in prop::collection::vec("[<|é]{2,5}", 0..8),
            users in prop::collection::vec(any::<bool>(), 8),
            text in "[<|éx]{0,12}",
        ) {
            let kind = |is_user| if is_user { TokenKind::UserDefined } else { TokenKind::Control };
            let kinds = users.into_iter().map(kind);
            let tokens: Vec<_> = texts.iter().map(String::as_str).zip(kinds).collect();
            let is_role_mark = |token: &str| token.contains('é');
            let marks = RoleMarks::new(&table(&tokens), &is_role_mark).expect("is built");
            let expected = simple(&tokens, &text, &is_role_mark);
            prop_assert_eq!(control(&tokens).hide(&text, '~', Some(&marks)), expected);
        }
    }
}
