//! The line on stderr that says what runs and how much time is left.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::bench::load::plan::Progress;

/// One line at the bottom of a terminal; without a terminal one line for each run.
#[derive(Clone, Debug)]
pub(super) struct Shown(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    bar: ProgressBar,
    done: u32,
    of: u32,
    what: String,
    left: Duration,
    since: Instant,
}

impl Shown {
    pub fn new(of: u32) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        bar.set_style(ProgressStyle::with_template("{msg}").unwrap_or_else(|_| ProgressStyle::default_bar()));
        Self(Arc::new(Mutex::new(State {
            bar,
            done: 0,
            of,
            what: String::new(),
            left: Duration::ZERO,
            since: Instant::now(),
        })))
    }

    /// A run begins. `left` is what the whole comparison still takes.
    pub fn begin(&self, what: &str, left: Duration) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.done += 1;
        what.clone_into(&mut state.what);
        state.left = left;
        state.since = Instant::now();
        let line = state.line("starting");
        match state.bar.is_hidden() {
            true => crate::terminal::say!("{line}"),
            false => state.bar.set_message(line),
        }
    }

    /// A few times a second while a run goes on.
    pub fn during(&self, progress: Progress) {
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let words = format!(
            "{} of {} sent, {} running",
            progress.sent,
            progress.requests,
            progress.running()
        );
        state.bar.set_message(state.line(&words));
    }

    /// A line that stays.
    pub fn say(&self, line: &str) {
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match state.bar.is_hidden() {
            true => crate::terminal::say!("{line}"),
            false => state.bar.println(line),
        }
    }

    pub fn end(&self) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .bar
            .finish_and_clear();
    }
}

impl State {
    fn line(&self, words: &str) -> String {
        let left = self.left.saturating_sub(self.since.elapsed()).as_secs();
        format!(
            "run {} of {}: {}, {words}; about {}:{:02} min left",
            self.done,
            self.of,
            self.what,
            left / 60,
            left % 60
        )
    }
}
