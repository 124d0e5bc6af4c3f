//! Owns the lock around the state: how a call enters and leaves, how it waits, and the thread that lets the device work while no
//! host thread calls. It never knows what a call does.

use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

use crate::codes::{Answer, Code};
use crate::order::Mark;
use crate::queue::Progress;
use crate::report;
use crate::settings::Settings;
use crate::state::State;

static STATE: LazyLock<Mutex<State>> = LazyLock::new(|| Mutex::new(State::new(Settings::from_environment())));
/// Told when a stream gets work.
static HAS_WORK: Condvar = Condvar::new();

/// Between two looks at work that another process or library has to end.
const POLL_EVERY: Duration = Duration::from_millis(1);
/// Between two operations of an idle device: long enough for a host thread to take the lock.
const BREATHE: Duration = Duration::from_micros(50);

thread_local! {
    /// Whether this thread is in a call: work that calls the driver from there would wait for itself.
    static IS_INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// What has to be there before a call may do anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Needs {
    Nothing,
    Initialised,
    /// A current context that no error has ended.
    Context,
}

/// The state, held by this thread. Device memory is closed again when it is let go.
pub(crate) struct Driver(Option<MutexGuard<'static, State>>);

const HELD: &str = "only `pause` takes the guard away, and it puts another one back";

impl Driver {
    fn lock() -> Self {
        IS_INSIDE.set(true);
        Self(Some(STATE.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// Lets others have the state for a while.
    fn pause(&mut self, time: Duration) {
        self.space.close();
        if let Some(guard) = self.0.take() {
            let (guard, _) = HAS_WORK
                .wait_timeout(guard, time)
                .unwrap_or_else(PoisonError::into_inner);
            self.0 = Some(guard);
        }
    }

    fn sleep_until_work(&mut self) {
        self.space.close();
        if let Some(guard) = self.0.take() {
            self.0 = Some(HAS_WORK.wait(guard).unwrap_or_else(PoisonError::into_inner));
        }
    }

    fn enter(&mut self, call: &'static str, needs: Needs) -> Answer {
        self.call = call;
        self.called_at = Instant::now();
        let count = self.calls.entry(call).or_default();
        *count += 1;
        let count = *count;
        let failures = self
            .settings
            .as_ref()
            .map_or(&[][..], |settings| &settings.failures[..]);
        let failure = failures
            .iter()
            .find(|failure| failure.call == call && failure.nth == count);
        if let Some(code) = failure.map(|failure| Code(failure.code)) {
            if let (Ok(device), true) = (self.current_device(), code.is_sticky()) {
                self.devices[device].sticky = Some(code);
            }
            return Err(code);
        }
        if needs != Needs::Nothing && !self.is_initialised {
            return Err(Code::NOT_INITIALIZED);
        }
        if needs == Needs::Context {
            let device = self.current_device()?;
            self.device_answer(device)?;
        }
        Ok(())
    }

    /// Waits until the marks are reached, and tells this thread what is over then.
    pub(crate) fn wait(&mut self, marks: &[Mark]) -> Answer {
        self.wait_until(|state| state.advance(marks))?;
        for mark in marks {
            self.learn(&mark.clock);
        }
        Ok(())
    }

    /// Waits for all work of a device.
    pub(crate) fn wait_for_device(&mut self, device: usize) -> Answer {
        let of_device = self.streams.iter().filter(|stream| stream.device == device);
        let marks: Vec<Mark> = of_device.map(|stream| stream.last.clone()).collect();
        self.wait(&marks)?;
        self.device_answer(device)
    }

    /// Lets the device work until it has come so far. Others may call meanwhile.
    pub(crate) fn wait_until(&mut self, mut advance: impl FnMut(&mut State) -> Progress) -> Answer {
        let wait_max = self
            .settings
            .as_ref()
            .map_or(Duration::ZERO, |settings| settings.wait_max);
        let deadline = Instant::now() + wait_max;
        let call = self.call;
        while advance(self) == Progress::Blocked {
            if Instant::now() > deadline {
                self.call = call;
                self.misuse("waited for work that does not end");
                if let Ok(device) = self.current_device() {
                    self.devices[device].sticky = Some(Code::LAUNCH_TIMEOUT);
                }
                return Err(Code::LAUNCH_TIMEOUT);
            }
            self.pause(POLL_EVERY);
        }
        self.call = call;
        Ok(())
    }
}

impl Deref for Driver {
    type Target = State;

    fn deref(&self) -> &State {
        self.0.as_deref().expect(HELD)
    }
}

impl DerefMut for Driver {
    fn deref_mut(&mut self) -> &mut State {
        self.0.as_deref_mut().expect(HELD)
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.space.close();
        IS_INSIDE.set(false);
    }
}

/// Runs the body of an exported function.
pub(crate) fn call(name: &'static str, needs: Needs, body: impl FnOnce(&mut Driver) -> Answer) -> i32 {
    if IS_INSIDE.get() {
        return Code::NOT_PERMITTED.0;
    }
    let mut driver = Driver::lock();
    let answer = driver.enter(name, needs).and_then(|()| body(&mut driver));
    HAS_WORK.notify_all();
    answer.err().map_or(0, |code| code.0)
}

/// Looks at the state outside of any call of the driver's interface.
pub(crate) fn with_state<R>(look: impl FnOnce(&mut State) -> R) -> R {
    let mut driver = Driver::lock();
    look(&mut driver)
}

/// Once in a process: the report at its end, and the thread that lets an idle device work.
pub(crate) fn start() -> Answer {
    static START: Once = Once::new();
    START.call_once(|| {
        // SAFETY: the function stays in the process (the library is never unloaded), takes nothing and does not unwind.
        unsafe { libc::atexit(report_at_exit) };
    });
    static DEVICE_THREAD: LazyLock<bool> = LazyLock::new(|| {
        let builder = std::thread::Builder::new().name("false-cuda".to_owned());
        builder.spawn(run_idle_device).is_ok()
    });
    if *DEVICE_THREAD {
        Ok(())
    } else {
        Err(Code::SYSTEM_NOT_READY)
    }
}

extern "C" fn report_at_exit() {
    // A thread that ends the process in the middle of a call has the lock, so its report is left out.
    if !IS_INSIDE.get() {
        with_state(report::write);
    }
}

fn run_idle_device() {
    let mut driver = Driver::lock();
    loop {
        let idle = driver.settings.as_ref().ok().and_then(|settings| settings.idle);
        let Some(idle) = idle.filter(|_| driver.has_work()) else {
            driver.sleep_until_work();
            continue;
        };
        let quiet = driver.called_at.elapsed();
        if quiet < idle {
            driver.pause(idle - quiet);
            continue;
        }
        let rest = match driver.run_some() {
            Progress::Done => BREATHE,
            Progress::Blocked => POLL_EVERY,
        };
        driver.pause(rest);
    }
}
