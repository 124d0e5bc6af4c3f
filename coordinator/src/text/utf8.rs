//! Turns the bytes of tokens into text, token by token. A character that is split over tokens is held back until it is
//! whole.

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
    pub fn new() -> Self {
        Self::default()
    }

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

    use super::*;

    fn in_pieces(bytes: &[u8], cuts: &[usize]) -> String {
        let mut decoder = Utf8Decoder::new();
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
        let mut decoder = Utf8Decoder::new();
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
        let mut decoder = Utf8Decoder::new();
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
