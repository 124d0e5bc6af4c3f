//! What a terminal can show. Colour goes only to a terminal that wants it.

use std::io::IsTerminal;

/// Prints a line on stderr. A reader that has gone away (`2>&1 | head`) must not end the process, as `eprintln!` would.
macro_rules! say {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr().lock(), $($text)*);
    }};
}
pub(crate) use say;

/// Colours of the nodes' names in log lines. They differ on dark and on light backgrounds.
const NAME_COLOURS: [u8; 6] = [36, 33, 35, 32, 34, 31];

/// The meaning of a piece of text, shown by colour. The words must carry the meaning too, for readers without colours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Paint {
    #[default]
    None,
    Bold,
    Dim,
    Good,
    Warn,
    Bad,
    /// The colour of the n-th of several things.
    Nth(usize),
}

/// Decides once how to write to stderr or stdout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terminal {
    has_colour: bool,
}

impl Terminal {
    /// Decides from stderr, `NO_COLOR` (any value but empty) and `TERM=dumb`.
    pub fn stderr() -> Self {
        Self {
            has_colour: std::io::stderr().is_terminal() && is_colour_wanted(),
        }
    }

    /// Decides from stdout and the same variables.
    pub fn stdout() -> Self {
        Self {
            has_colour: std::io::stdout().is_terminal() && is_colour_wanted(),
        }
    }

    pub fn plain() -> Self {
        Self { has_colour: false }
    }

    #[cfg(test)]
    pub fn coloured() -> Self {
        Self { has_colour: true }
    }

    pub fn dim(self, text: &str) -> String {
        self.paint(text, Paint::Dim)
    }

    pub(crate) fn bold(self, text: &str) -> String {
        self.paint(text, Paint::Bold)
    }

    /// The same name always gets the same colour.
    pub fn name(self, name: &str) -> String {
        let sum: usize = name.bytes().map(usize::from).sum();
        self.paint(name, Paint::Nth(sum))
    }

    pub(crate) fn paint(self, text: &str, paint: Paint) -> String {
        let code = match paint {
            Paint::None => 0,
            Paint::Bold => 1,
            Paint::Dim => 2,
            Paint::Good => 32,
            Paint::Warn => 33,
            Paint::Bad => 31,
            Paint::Nth(n) => NAME_COLOURS[n % NAME_COLOURS.len()],
        };
        if self.has_colour && code > 0 {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }
}

fn is_colour_wanted() -> bool {
    let no_colour = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    !no_colour && !is_dumb()
}

/// `TERM=dumb`: the terminal shows ASCII characters only, one line after the other.
pub(crate) fn is_dumb() -> bool {
    std::env::var_os("TERM").is_some_and(|value| value == "dumb")
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
