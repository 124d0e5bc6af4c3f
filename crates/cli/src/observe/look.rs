//! What stdout can show: size, colours, characters.

use std::io::IsTerminal;

use crate::terminal::{Terminal, is_dumb};

/// The width when stdout is no terminal: what a wide editor shows of a log.
const WIDTH_PIPED: usize = 100;
/// The size when the terminal does not report one.
const SIZE_UNTOLD: (usize, usize) = (80, 24);
/// On a narrower terminal lines wrap, because there is no room for a name and a bar.
const WIDTH_MIN: usize = 60;
const WIDTH_MAX: usize = 400;

/// Decided once for a verb, and given to everything that draws.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    pub terminal: Terminal,
    pub is_ascii: bool,
    pub width: usize,
}

impl Look {
    pub fn stdout(is_ascii_wanted: bool) -> Self {
        let width = stdout_size().map_or(WIDTH_PIPED, |(width, _)| width);
        Self {
            terminal: Terminal::stdout(),
            is_ascii: is_ascii_wanted || is_dumb(),
            width: width.clamp(WIDTH_MIN, WIDTH_MAX),
        }
    }

    #[cfg(test)]
    pub fn plain(width: usize) -> Self {
        Self {
            terminal: Terminal::plain(),
            is_ascii: false,
            width,
        }
    }
}

/// Columns and rows of the terminal; `None` when stdout is not one.
pub fn stdout_size() -> Option<(usize, usize)> {
    let out = std::io::stdout();
    if !out.is_terminal() {
        return None;
    }
    let size = rustix::termios::tcgetwinsize(&out).ok();
    let size = size.map(|size| (usize::from(size.ws_col), usize::from(size.ws_row)));
    Some(
        size.filter(|(columns, rows)| *columns > 0 && *rows > 0)
            .unwrap_or(SIZE_UNTOLD),
    )
}
