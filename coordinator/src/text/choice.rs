//! The text of one choice while its tokens come in: decoding and stop strings together.

use super::stop::StopMatcher;
use super::utf8::Utf8Decoder;

/// What one token added to the text of its choice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextDelta {
    /// It may be empty: the token was a control token or half a character, or it may begin a stop string.
    pub text: String,
    pub is_stopped: bool,
}

#[derive(Debug)]
pub struct ChoiceText {
    decoder: Utf8Decoder,
    stops: StopMatcher,
}

impl ChoiceText {
    pub fn new(stops: &[String]) -> Self {
        Self {
            decoder: Utf8Decoder::new(),
            stops: StopMatcher::new(stops),
        }
    }

    /// Characters decoded so far, including text that is held back. It is the `text_offset` of the next token.
    pub fn chars(&self) -> usize {
        self.decoder.chars()
    }

    /// `is_last`: no token follows, so nothing is held back any more.
    pub fn push(&mut self, bytes: &[u8], is_last: bool) -> TextDelta {
        let mut decoded = String::new();
        self.decoder.push(bytes, &mut decoded);
        if is_last {
            self.decoder.finish(&mut decoded);
        }
        let mut out = self.stops.push(&decoded);
        if is_last && !out.is_stopped {
            out.text.push_str(&self.stops.finish());
        }
        TextDelta {
            text: out.text,
            is_stopped: out.is_stopped,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_string_completed_by_the_last_token_still_stops() {
        let mut choice = ChoiceText::new(&["END".to_owned()]);
        assert_eq!(choice.push(b"yes E", false).text, "yes ");
        let last = choice.push(b"ND", true);
        assert_eq!(
            last,
            TextDelta {
                text: String::new(),
                is_stopped: true
            }
        );
    }

    #[test]
    fn the_last_token_flushes_both_holds() {
        let mut choice = ChoiceText::new(&["xyz".to_owned()]);
        assert_eq!(choice.push(b"x", false).text, "");
        assert_eq!(choice.push(&[0xE2, 0x82], true).text, "x\u{FFFD}");
    }
}
