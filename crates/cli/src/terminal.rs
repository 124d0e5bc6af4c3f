//! What stderr can show: colour only on a terminal that wants it.

use std::io::IsTerminal;

/// A line on stderr. A reader that has gone away (`2>&1 | head`) must not end what runs, as `eprintln!` would.
macro_rules! say {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr().lock(), $($text)*);
    }};
}
pub(crate) use say;

/// Colours of the nodes' names in log lines, told apart on dark and light backgrounds.
const NAME_COLOURS: [u8; 6] = [36, 33, 35, 32, 34, 31];

/// Decides once how to write to stderr.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terminal {
    has_colour: bool,
}

impl Terminal {
    /// From stderr, `NO_COLOR` (any value but empty) and `TERM=dumb`.
    pub fn stderr() -> Self {
        let no_colour = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let is_dumb = std::env::var_os("TERM").is_some_and(|value| value == "dumb");
        Self {
            has_colour: std::io::stderr().is_terminal() && !no_colour && !is_dumb,
        }
    }

    pub fn plain() -> Self {
        Self { has_colour: false }
    }

    pub fn has_colour(self) -> bool {
        self.has_colour
    }

    pub fn dim(self, text: &str) -> String {
        self.paint(text, 2)
    }

    pub fn bold(self, text: &str) -> String {
        self.paint(text, 1)
    }

    /// The same name always gets the same colour.
    pub fn name(self, name: &str) -> String {
        let sum: usize = name.bytes().map(usize::from).sum();
        self.paint(name, NAME_COLOURS[sum % NAME_COLOURS.len()])
    }

    fn paint(self, text: &str, code: u8) -> String {
        if self.has_colour {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_text_stays_plain() {
        assert_eq!(Terminal::plain().name("prefill-0"), "prefill-0");
        assert_eq!(Terminal { has_colour: true }.bold("x"), "\x1b[1mx\x1b[0m");
    }
}
