//! The text of one choice while its tokens come in: bytes become characters, and stop strings are found, cut off, and held
//! back while they may begin. Everything about stop strings is here, from the field `stop` to the end of the choice.

use serde::Serialize;
use serving_core::request::{FinishReason, TokenEvent};

use super::TextModel;

/// OpenAI allows 4 stop strings, vLLM any number. Every token is searched for each of them.
pub const STOP_STRINGS_MAX: usize = 16;
/// While a stop string may have begun, as much text as it is long is held back.
const STOP_STRING_CHARS_MAX: usize = 256;

/// The field `stop`: a string or a list of strings.
#[derive(Clone, Debug, Default)]
pub struct StopStrings(pub Vec<String>);

impl StopStrings {
    /// What a client may send.
    pub const WANTED: &str = "a string or a list of strings, at most 16 of 1 to 256 characters each";

    /// `None` if a string is empty or too long, or if there are too many strings.
    pub fn new(stops: Vec<String>) -> Option<Self> {
        let is_long = |stop: &String| stop.is_empty() || stop.chars().count() > STOP_STRING_CHARS_MAX;
        (stops.len() <= STOP_STRINGS_MAX && !stops.iter().any(is_long)).then_some(Self(stops))
    }
}

/// What a client asked for that ended its choice, as the field `stop_reason` of vLLM has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum StopReason {
    Token(u32),
    Text(String),
}

/// What one token did to its choice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextStep {
    /// It may be empty: the token was a control token, a stop token or half a character, or it may begin a stop string.
    pub text: String,
    /// Characters of generated text before this token, including text that is held back.
    pub text_offset: usize,
    pub finish: Option<FinishReason>,
    /// `None` also for a choice that ended by itself, or at its limit.
    pub stop_reason: Option<StopReason>,
    /// A stop string ended the choice, and the nodes do not know that yet.
    pub ends_here: bool,
}

/// The state of one choice.
#[derive(Debug)]
pub struct ChoiceText {
    decoder: Utf8Decoder,
    stops: StopMatcher,
    /// No stop string ends within the text of so many tokens.
    min_tokens: u32,
    tokens: u32,
    is_finished: bool,
}

impl ChoiceText {
    pub fn new(stops: &[String], min_tokens: u32) -> Self {
        Self {
            decoder: Utf8Decoder::default(),
            stops: StopMatcher::new(stops),
            min_tokens,
            tokens: 0,
            is_finished: false,
        }
    }

    pub fn is_finished(&self) -> bool {
        self.is_finished
    }

    /// Takes the next token. `None` for a token that was under way when a stop string ended the choice.
    ///
    /// # Errors
    /// The token is not the next one.
    pub fn take(&mut self, model: &TextModel, token: &TokenEvent) -> Result<Option<TextStep>, &'static str> {
        if self.is_finished {
            return Ok(None);
        }
        if token.index.0 != self.tokens {
            return Err("a token came out of order");
        }
        // The token that ends an answer is no part of its text, as a stop string is none.
        let is_end = matches!(token.finish, Some(FinishReason::EndToken | FinishReason::StopToken(_)));
        let is_hidden = is_end || model.codec().is_special(token.token);
        let bytes = model.codec().token_bytes(token.token).filter(|_| !is_hidden);
        let text_offset = self.decoder.chars();
        let (text, stopped_by) = self.push(bytes.unwrap_or_default(), token.finish.is_some());
        let is_stopped = stopped_by.is_some();
        let (finish, stop_reason) = match (stopped_by, token.finish) {
            (Some(stop), _) => (Some(FinishReason::StopString), Some(StopReason::Text(stop))),
            (None, Some(FinishReason::StopToken(id))) => (token.finish, Some(StopReason::Token(id.0))),
            (None, finish) => (finish, None),
        };
        self.tokens += 1;
        self.is_finished = finish.is_some();
        Ok(Some(TextStep {
            text,
            text_offset,
            finish,
            stop_reason,
            ends_here: is_stopped && token.finish.is_none(),
        }))
    }

    /// The text, and the stop string that ends it. `is_last`: no token follows, so nothing is held back any more.
    fn push(&mut self, bytes: &[u8], is_last: bool) -> (String, Option<String>) {
        let mut decoded = String::new();
        self.decoder.push(bytes, &mut decoded);
        if is_last {
            self.decoder.finish(&mut decoded);
        }
        let (mut text, stopped_by) = match self.tokens < self.min_tokens {
            true => (self.stops.push_exempt(&decoded), None),
            false => self.stops.push(decoded),
        };
        if is_last && stopped_by.is_none() {
            text.push_str(&self.stops.finish());
        }
        (text, stopped_by)
    }
}

/// Finds the stop string that is *completed first*. (Of two that the same character completes it is the one that began
/// first.) So the result is the same however the text is cut into pieces.
#[derive(Debug)]
struct StopMatcher {
    stops: Vec<String>,
    /// The longest end of the text with which a stop string could begin.
    held: String,
    /// No stop string ends within so many bytes of `held`.
    exempt_bytes: usize,
}

impl StopMatcher {
    fn new(stops: &[String]) -> Self {
        Self {
            stops: stops.to_vec(),
            held: String::new(),
            exempt_bytes: 0,
        }
    }

    /// Takes text within which no stop string may end; one that begins in it may end later. Returns the text that certainly stands before
    /// any stop string.
    fn push_exempt(&mut self, piece: &str) -> String {
        self.held.push_str(piece);
        let text = self.give_out();
        self.exempt_bytes = self.held.len();
        text
    }

    /// The text that certainly stands before any stop string, and the one that was completed. Nothing more may be pushed then.
    fn push(&mut self, piece: String) -> (String, Option<String>) {
        if self.stops.is_empty() {
            return (piece, None);
        }
        self.held.push_str(&piece);
        if let Some((start, stop)) = self.first_match() {
            let stop = stop.to_owned();
            let mut text = std::mem::take(&mut self.held);
            text.truncate(start);
            return (text, Some(stop));
        }
        (self.give_out(), None)
    }

    /// All but the end with which a stop string could begin.
    fn give_out(&mut self) -> String {
        let keep_from = self.possible_beginning();
        self.exempt_bytes = self.exempt_bytes.saturating_sub(keep_from);
        let tail = self.held.split_off(keep_from);
        std::mem::replace(&mut self.held, tail)
    }

    /// No text follows, so the held text belongs to the answer.
    fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Where it begins, and which one it is.
    fn first_match(&self) -> Option<(usize, &str)> {
        let found = self.stops.iter().filter_map(|stop| {
            // One that ends behind the exempt bytes.
            let earliest = (self.exempt_bytes + 1).saturating_sub(stop.len());
            let from = (earliest..self.held.len()).find(|at| self.held.is_char_boundary(*at))?;
            let start = from + self.held[from..].find(stop.as_str())?;
            Some((start + stop.len(), start, stop.as_str()))
        });
        found.min().map(|(_, start, stop)| (start, stop))
    }

    /// Byte offset of the longest tail that is a proper beginning of a stop string; the text's length when none is.
    fn possible_beginning(&self) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0).saturating_sub(1);
        let from = self.held.len().saturating_sub(longest);
        (from..self.held.len())
            .filter(|at| self.held.is_char_boundary(*at))
            .find(|at| {
                let tail = &self.held[*at..];
                self.stops
                    .iter()
                    .any(|stop| stop.len() > tail.len() && stop.starts_with(tail))
            })
            .unwrap_or(self.held.len())
    }
}

/// Turns a stream of bytes into text. The concatenation of all pieces equals `String::from_utf8_lossy` of all bytes,
/// however the bytes are cut.
#[derive(Debug, Default)]
pub struct Utf8Decoder {
    /// The start of a character whose end has not come: at most three bytes.
    partial: Vec<u8>,
    /// Characters handed out so far.
    chars: usize,
}

impl Utf8Decoder {
    /// Characters of text handed out so far.
    pub fn chars(&self) -> usize {
        self.chars
    }

    /// Appends the text that is certain now to `out`.
    pub fn push(&mut self, bytes: &[u8], out: &mut String) {
        self.partial.extend_from_slice(bytes);
        let pending = std::mem::take(&mut self.partial);
        let mut rest: &[u8] = &pending;
        loop {
            match std::str::from_utf8(rest) {
                Ok(text) => {
                    self.emit(text, out);
                    return;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    if let Ok(text) = std::str::from_utf8(valid) {
                        self.emit(text, out);
                    }
                    match error.error_len() {
                        // These bytes are never valid, whatever follows.
                        Some(length) => {
                            self.emit("\u{FFFD}", out);
                            rest = &after[length..];
                        }
                        // The character is only cut short. Wait for the rest.
                        None => {
                            self.partial = after.to_vec();
                            return;
                        }
                    }
                }
            }
        }
    }

    /// No byte will follow. An unfinished character becomes one U+FFFD.
    pub fn finish(&mut self, out: &mut String) {
        if !self.partial.is_empty() {
            self.partial.clear();
            self.emit("\u{FFFD}", out);
        }
    }

    fn emit(&mut self, text: &str, out: &mut String) {
        self.chars += text.chars().count();
        out.push_str(text);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serving_core::ids::{ChoiceIndex, OutputIndex, TokenId};

    use super::*;

    fn model() -> TextModel {
        TextModel::open(&model_files::test_kit::model_path(), None).expect("the real model")
    }

    fn event(index: u32, token: TokenId, finish: Option<FinishReason>) -> TokenEvent {
        TokenEvent {
            choice: ChoiceIndex(0),
            index: OutputIndex(index),
            token,
            logprobs: None,
            finish,
        }
    }

    #[test]
    fn a_stop_token_is_no_part_of_the_text_and_what_was_held_is() {
        let model = model();
        let token = |text: &str| {
            let tokens = model.codec().encode(text, false, usize::MAX).expect("is encoded");
            assert_eq!(tokens.len(), 1, "{text}");
            tokens[0]
        };
        let (word, stop) = (token(" two"), token("."));
        let last = |finish| {
            let mut choice = ChoiceText::new(&["o.".to_owned()], 0);
            let first = choice.take(&model, &event(0, word, None));
            assert_eq!(
                first.expect("in order").expect("goes on").text,
                " tw",
                "the rest may begin a stop string"
            );
            let last = choice.take(&model, &event(1, stop, Some(finish)));
            let last = last.expect("in order").expect("is the last");
            assert!(choice.is_finished());
            (last.text, last.finish, last.stop_reason)
        };
        let stopped = FinishReason::StopToken(stop);
        let by_token = Some(StopReason::Token(stop.0));
        assert_eq!(last(stopped), ("o".to_owned(), Some(stopped), by_token));
        // Without it the same token completes a stop string.
        let cut = last(FinishReason::Length);
        let by_text = Some(StopReason::Text("o.".to_owned()));
        assert_eq!(cut, (String::new(), Some(FinishReason::StopString), by_text));
    }

    #[test]
    fn the_least_number_of_tokens_counts_for_stop_strings_too() {
        let model = model();
        let dots = model.codec().encode(".", false, usize::MAX).expect("is encoded");
        for (stop, text, count) in [(".", "...", 4), ("..", "..", 4), ("......", "", 6)] {
            let mut choice = ChoiceText::new(&[stop.to_owned()], 3);
            let (mut all, mut taken) = (String::new(), 0);
            while !choice.is_finished() && taken < 6 {
                let finish = (taken == 5).then_some(FinishReason::Length);
                let step = choice.take(&model, &event(taken, dots[0], finish));
                all += &step.expect("in order").expect("goes on").text;
                taken += 1;
            }
            assert_eq!((all.as_str(), taken), (text, count), "stop at {stop}");
        }
    }

    #[test]
    fn a_stop_string_completed_by_the_last_token_still_stops() {
        let mut choice = ChoiceText::new(&["END".to_owned()], 0);
        assert_eq!(choice.push(b"yes E", false).0, "yes ");
        assert_eq!(choice.push(b"ND", true), (String::new(), Some("END".to_owned())));
    }

    #[test]
    fn the_last_token_flushes_both_holds() {
        let mut choice = ChoiceText::new(&["xyz".to_owned()], 0);
        assert_eq!(choice.push(b"x", false).0, "");
        assert_eq!(choice.push(&[0xE2, 0x82], true).0, "x\u{FFFD}");
    }

    fn strings(stops: &[&str]) -> Vec<String> {
        stops.iter().map(|s| (*s).to_owned()).collect()
    }

    fn run(stops: &[String], pieces: &[&str]) -> (String, bool) {
        let mut matcher = StopMatcher::new(stops);
        let mut text = String::new();
        for piece in pieces {
            let (out, stopped_by) = matcher.push((*piece).to_owned());
            text.push_str(&out);
            if stopped_by.is_some() {
                return (text, true);
            }
        }
        text.push_str(&matcher.finish());
        (text, false)
    }

    /// The definition in its simplest form: the first end position at which any stop string ends.
    fn by_definition(stops: &[String], text: &str) -> (String, bool) {
        for end in 0..=text.len() {
            if !text.is_char_boundary(end) {
                continue;
            }
            if let Some(longest) = stops
                .iter()
                .filter(|s| text[..end].ends_with(s.as_str()))
                .map(String::len)
                .max()
            {
                return (text[..end - longest].to_owned(), true);
            }
        }
        (text.to_owned(), false)
    }

    #[test]
    fn found_across_pieces_and_cut_before() {
        let out = run(&strings(&["\n\nQ:"]), &["The answer\n", "\n", "Q", ": next"]);
        assert_eq!(out, ("The answer".to_owned(), true));
    }

    #[test]
    fn a_beginning_that_comes_to_nothing_is_given_out() {
        let mut matcher = StopMatcher::new(&strings(&["END"]));
        assert_eq!(matcher.push("an E".to_owned()).0, "an ");
        assert_eq!(matcher.push("N".to_owned()).0, "");
        assert_eq!(matcher.push("gine".to_owned()).0, "ENgine");
    }

    #[test]
    fn a_stop_string_may_begin_in_exempt_text_and_not_end_there() {
        let mut matcher = StopMatcher::new(&strings(&["ab", "abc", "€€"]));
        assert_eq!(matcher.push_exempt("ab€€x"), "ab€€x");
        assert_eq!(matcher.push_exempt("yab"), "y", "abc may still come");
        assert_eq!(matcher.push("d".to_owned()), ("abd".to_owned(), None));
        assert_eq!(matcher.push_exempt("zab"), "z");
        assert_eq!(matcher.push("c".to_owned()), (String::new(), Some("abc".to_owned())));
        let mut matcher = StopMatcher::new(&strings(&["€€"]));
        assert_eq!(matcher.push_exempt("€€€"), "€€");
        assert_eq!(matcher.push("x".to_owned()), ("€x".to_owned(), None));
        assert_eq!(matcher.push_exempt("€"), "");
        assert_eq!(matcher.push("€€".to_owned()), (String::new(), Some("€€".to_owned())));
    }

    #[test]
    fn held_text_comes_out_at_the_end() {
        let mut matcher = StopMatcher::new(&strings(&["stop"]));
        assert_eq!(matcher.push("sto".to_owned()).0, "");
        assert_eq!(matcher.finish(), "sto");
    }

    proptest! {
        #[test]
        fn any_cutting_equals_the_definition(
            stops in proptest::collection::vec("[ab€]{1,4}", 0..4),
            pieces in proptest::collection::vec("[abc€]{0,3}", 0..20),
        ) {
            let text: String = pieces.concat();
            let borrowed: Vec<&str> = pieces.iter().map(String::as_str).collect();
            prop_assert_eq!(run(&stops, &borrowed), by_definition(&stops, &text));
        }
    }

    fn in_pieces(bytes: &[u8], cuts: &[usize]) -> String {
        let mut decoder = Utf8Decoder::default();
        let mut out = String::new();
        let mut at = 0;
        for cut in cuts {
            let next = (at + cut).min(bytes.len());
            decoder.push(&bytes[at..next], &mut out);
            at = next;
        }
        decoder.push(&bytes[at..], &mut out);
        decoder.finish(&mut out);
        assert_eq!(decoder.chars(), out.chars().count());
        out
    }

    #[test]
    fn a_split_character_is_held_not_replaced() {
        let mut decoder = Utf8Decoder::default();
        let mut out = String::new();
        let euro = "€".as_bytes();
        decoder.push(&euro[..1], &mut out);
        decoder.push(&euro[1..2], &mut out);
        assert_eq!(out, "");
        decoder.push(&euro[2..], &mut out);
        assert_eq!(out, "€");
    }

    #[test]
    fn an_unfinished_character_becomes_one_replacement_at_the_end() {
        let mut decoder = Utf8Decoder::default();
        let mut out = String::new();
        decoder.push(&"🦀".as_bytes()[..3], &mut out);
        decoder.finish(&mut out);
        assert_eq!(out, "\u{FFFD}");
    }

    proptest! {
        #[test]
        fn pieces_equal_the_whole_for_any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..80), cuts in proptest::collection::vec(0usize..5, 0..40)) {
            prop_assert_eq!(in_pieces(&bytes, &cuts), String::from_utf8_lossy(&bytes));
        }

        #[test]
        fn pieces_equal_the_whole_for_any_text(text in "[a€🦀é]{0,30}", cuts in proptest::collection::vec(0usize..4, 0..60)) {
            prop_assert_eq!(in_pieces(text.as_bytes(), &cuts), text);
        }
    }
}
