//! The terminal of `baton top`: its alternate screen, keys without Enter, and the restored state at the end.

use std::io::{IsTerminal, Read, Write};
use std::thread;

use anyhow::Context;
use rustix::termios::{LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcsetattr};
use tokio::sync::mpsc;

use crate::observe::look::stdout_size;

/// Nobody types faster than keys are read. Further keys are dropped with the screen.
const KEYS_MAX: usize = 16;
const SIZE_UNTOLD: (usize, usize) = (80, 24);

const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[2J";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";

/// Dropping it restores the terminal, however the verb ends.
#[derive(Debug)]
pub struct Screen {
    /// `None` when stdin is no terminal. Then there are no keys and no modes to restore.
    modes_before: Option<Termios>,
    keys: mpsc::Receiver<u8>,
}

impl Screen {
    /// # Errors
    /// The terminal cannot be written to or does not take its modes.
    pub fn enter() -> anyhow::Result<Self> {
        let (sender, keys) = mpsc::channel(KEYS_MAX);
        let mut screen = Self {
            modes_before: None,
            keys,
        };
        let stdin = std::io::stdin();
        if stdin.is_terminal() {
            let before = tcgetattr(&stdin).context("cannot read the modes of the terminal")?;
            let mut modes = before.clone();
            // Ctrl-C stays a signal. Ctrl-Z and Ctrl-\ would leave the shell with our screen and modes.
            modes.local_modes.remove(LocalModes::ICANON | LocalModes::ECHO);
            modes.special_codes[SpecialCodeIndex::VSUSP] = 0;
            modes.special_codes[SpecialCodeIndex::VQUIT] = 0;
            modes.special_codes[SpecialCodeIndex::VMIN] = 1;
            modes.special_codes[SpecialCodeIndex::VTIME] = 0;
            tcsetattr(&stdin, OptionalActions::Now, &modes).context("the terminal does not take its modes")?;
            screen.modes_before = Some(before);
            thread::Builder::new()
                .name("top-keys".to_owned())
                .spawn(move || read_keys(&sender))
                .context("cannot start the reader of keys")?;
        }
        write(ENTER)?;
        Ok(screen)
    }

    /// Columns and rows now, because a window may change its size.
    pub fn size(&self) -> (usize, usize) {
        stdout_size().unwrap_or(SIZE_UNTOLD)
    }

    /// The next key. Waits for ever where there are no keys.
    pub async fn key(&mut self) -> u8 {
        match self.keys.recv().await {
            Some(key) => key,
            None => std::future::pending().await,
        }
    }

    /// # Errors
    /// The terminal is gone.
    pub fn draw(&mut self, lines: &[String]) -> anyhow::Result<()> {
        // Each line is overwritten and its rest cleared, so nothing flickers. The last line has no newline, because a
        // newline would scroll.
        let body: Vec<String> = lines.iter().map(|line| format!("{line}\x1b[K")).collect();
        write(&format!("\x1b[H{}\x1b[J", body.join("\r\n")))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // A terminal that takes neither cannot be helped.
        let _ = write(LEAVE);
        if let Some(modes) = &self.modes_before {
            let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, modes);
        }
    }
}

fn write(text: &str) -> anyhow::Result<()> {
    let mut out = crate::stdout::stdout();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

/// Ends with the end of the input, or with the first key after the screen is gone.
fn read_keys(sender: &mpsc::Sender<u8>) {
    let mut key = [0_u8; 1];
    while let Ok(1) = std::io::stdin().lock().read(&mut key) {
        if sender.blocking_send(key[0]).is_err() {
            return;
        }
    }
}
