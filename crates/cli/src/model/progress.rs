//! Progress of a step with bytes on stderr, such as a download: a bar on a terminal, a line every few seconds elsewhere.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::terminal::say;

/// Time between lines in a log: often enough to show that the download lives, seldom enough not to fill the log.
const LINE_INTERVAL: Duration = Duration::from_secs(5);

/// Progress of one step. It has no colour, so `NO_COLOR` needs no case of its own.
#[derive(Debug)]
pub struct Progress {
    label: String,
    total: Option<u64>,
    /// `None` where stderr is not a terminal.
    bar: Option<ProgressBar>,
    last_line: Instant,
    quiet: bool,
}

impl Progress {
    /// `total` is in bytes, if it is known.
    pub fn start(label: impl Into<String>, total: Option<u64>, quiet: bool) -> Progress {
        let label = label.into();
        let bar = (!quiet && std::io::stderr().is_terminal()).then(|| {
            let template = match total {
                Some(_) => "{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec}",
                None => "{msg} {spinner} {bytes} {bytes_per_sec}",
            };
            let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
            let bar = total
                .map_or_else(ProgressBar::new_spinner, ProgressBar::new)
                .with_style(style);
            bar.set_message(label.clone());
            bar
        });
        if bar.is_none() && !quiet {
            say!("{label}...");
        }
        Progress {
            label,
            total,
            bar,
            last_line: Instant::now(),
            quiet,
        }
    }

    /// `done` bytes of the step are done.
    pub fn at(&mut self, done: u64) {
        if let Some(bar) = &self.bar {
            bar.set_position(done);
            bar.tick();
        } else if !self.quiet && self.last_line.elapsed() >= LINE_INTERVAL {
            self.last_line = Instant::now();
            let megabytes = |bytes: u64| bytes / 1_000_000;
            match self.total {
                Some(total) => say!("{}: {} of {} MB", self.label, megabytes(done), megabytes(total)),
                None => say!("{}: {} MB", self.label, megabytes(done)),
            }
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
