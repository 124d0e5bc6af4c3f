//! Stop strings over a stream of text pieces. They are found across pieces, cut off, and held back while they may begin.

/// The result of one piece of text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopOutcome {
    /// Text that certainly stands before any stop string.
    pub text: String,
    /// A stop string was completed. Nothing more may be pushed.
    pub is_stopped: bool,
}

/// Finds the stop string that is *completed first*. (Of two that the same character completes it is the one that began
/// first.) So the result is the same however the text is cut into pieces.
#[derive(Debug)]
pub struct StopMatcher {
    stops: Vec<String>,
    /// The longest end of the text with which a stop string could begin.
    held: String,
}

impl StopMatcher {
    /// `stops` must not contain the empty string: the edge rejects it before this.
    pub fn new(stops: &[String]) -> Self {
        Self {
            stops: stops.iter().filter(|s| !s.is_empty()).cloned().collect(),
            held: String::new(),
        }
    }

    pub fn push(&mut self, piece: &str) -> StopOutcome {
        if self.stops.is_empty() {
            return StopOutcome {
                text: piece.to_owned(),
                is_stopped: false,
            };
        }
        self.held.push_str(piece);
        if let Some(start) = self.first_match() {
            let mut text = std::mem::take(&mut self.held);
            text.truncate(start);
            return StopOutcome { text, is_stopped: true };
        }
        let keep_from = self.possible_beginning();
        let tail = self.held.split_off(keep_from);
        StopOutcome {
            text: std::mem::replace(&mut self.held, tail),
            is_stopped: false,
        }
    }

    /// No text follows, so the held text belongs to the answer.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    fn first_match(&self) -> Option<usize> {
        self.stops
            .iter()
            .filter_map(|stop| self.held.find(stop.as_str()).map(|start| (start + stop.len(), start)))
            .min()
            .map(|(_, start)| start)
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn strings(stops: &[&str]) -> Vec<String> {
        stops.iter().map(|s| (*s).to_owned()).collect()
    }

    fn run(stops: &[String], pieces: &[&str]) -> StopOutcome {
        let mut matcher = StopMatcher::new(stops);
        let mut text = String::new();
        for piece in pieces {
            let out = matcher.push(piece);
            text.push_str(&out.text);
            if out.is_stopped {
                return StopOutcome { text, is_stopped: true };
            }
        }
        text.push_str(&matcher.finish());
        StopOutcome {
            text,
            is_stopped: false,
        }
    }

    /// The definition in its simplest form: the first end position at which any stop string ends.
    fn by_definition(stops: &[String], text: &str) -> StopOutcome {
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
                return StopOutcome {
                    text: text[..end - longest].to_owned(),
                    is_stopped: true,
                };
            }
        }
        StopOutcome {
            text: text.to_owned(),
            is_stopped: false,
        }
    }

    #[test]
    fn found_across_pieces_and_cut_before() {
        let out = run(&strings(&["\n\nQ:"]), &["The answer\n", "\n", "Q", ": next"]);
        assert_eq!(
            out,
            StopOutcome {
                text: "The answer".into(),
                is_stopped: true
            }
        );
    }

    #[test]
    fn a_beginning_that_comes_to_nothing_is_given_out() {
        let mut matcher = StopMatcher::new(&strings(&["END"]));
        assert_eq!(matcher.push("an E").text, "an ");
        assert_eq!(matcher.push("N").text, "");
        assert_eq!(matcher.push("gine").text, "ENgine");
    }

    #[test]
    fn held_text_comes_out_at_the_end() {
        let mut matcher = StopMatcher::new(&strings(&["stop"]));
        assert_eq!(matcher.push("sto").text, "");
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
}
