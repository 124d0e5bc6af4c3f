//! Owns what a test sets: the variables, read at the first call and again by `false_cuda_reset`.
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `FALSE_CUDA_DEVICES` | how many devices there are; 0 is a machine without one | 1 |
//! | `CUDA_VISIBLE_DEVICES` | as for the real driver: numbers of devices; the first one that is none ends the list | all |
//! | `FALSE_CUDA_MEMORY_BYTES` | memory of each device | 1 GiB |
//! | `FALSE_CUDA_NAME` | name of each device | `False H200` |
//! | `FALSE_CUDA_CC` | compute capability | `9.0` |
//! | `FALSE_CUDA_VERSION` | what `cuDriverGetVersion` answers; decides which PTX is too new | 13000 |
//! | `FALSE_CUDA_SEED` | order of the work; 0: all runs as late as it can, see `FALSE_CUDA_IDLE_MS` | 1 |
//! | `FALSE_CUDA_FAIL` | `cuMemAllocAsync:2:2`: the second call answers 2; several by commas | none |
//! | `FALSE_CUDA_HANG` | path: while there is such a file the devices end no work; `%p` is the process's id | none |
//! | `FALSE_CUDA_LOST` | path: once there is such a file a device's next work ends with LAUNCH_FAILED; `%p` as above | none |
//! | `FALSE_CUDA_STEPS_MAX` | thread instructions of a launch; a launch with more ends with LAUNCH_TIMEOUT | 2^33 |
//! | `FALSE_CUDA_HOST_CLOCKS` | `joined` or `separate`, see below | `joined` |
//! | `FALSE_CUDA_IDLE_MS` | after so long without a call the device works by itself; 0: never | 20 |
//! | `FALSE_CUDA_WAIT_MS_MAX` | a wait that takes longer ends with LAUNCH_TIMEOUT, and is found as misuse | 120000 |
//! | `FALSE_CUDA_REPORT` | path of the JSON report that is written at exit; `%p` is the process's id | none |
//!
//! Host clocks: what a wait tells. `joined`: every thread knows what one thread has waited for. That is right for a program whose
//! threads tell each other; it misses a thread that uses a result without having been told. `separate`: a wait tells its own thread
//! only, a new thread begins with what all know, and `false_cuda_meet` stands for a lock or a channel between threads.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// A variable that the double cannot use: whoever starts the program corrects it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name}={value} is not {wanted}; correct the variable")]
pub struct BadVariable {
    pub name: String,
    pub value: String,
    pub wanted: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HostClocks {
    Joined,
    Separate,
}

/// The `nth` call of a name answers a code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) call: String,
    pub(crate) nth: u64,
    pub(crate) code: i32,
}

#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) devices: usize,
    pub(crate) memory_bytes: usize,
    pub(crate) name: String,
    /// 90 is 9.0.
    pub(crate) compute_capability: i32,
    pub(crate) version: i32,
    pub(crate) seed: u64,
    pub(crate) failures: Vec<Failure>,
    /// Files that a test makes when it wants the trouble.
    pub(crate) hang: Option<PathBuf>,
    pub(crate) lost: Option<PathBuf>,
    pub(crate) steps_max: u64,
    pub(crate) host_clocks: HostClocks,
    pub(crate) idle: Option<Duration>,
    pub(crate) wait_max: Duration,
    pub(crate) report: Option<PathBuf>,
}

type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

fn number<T: FromStr>(lookup: Lookup<'_>, name: &str, default: T) -> Result<T, BadVariable> {
    let Some(value) = lookup(name) else { return Ok(default) };
    value.parse().map_err(|_| bad(name, &value, "a number in its range"))
}

fn bad(name: &str, value: &str, wanted: &'static str) -> BadVariable {
    BadVariable {
        name: name.to_owned(),
        value: value.to_owned(),
        wanted,
    }
}

fn failures(text: &str) -> Option<Vec<Failure>> {
    let failure = |part: &str| {
        let mut fields = part.split(':');
        let (call, nth, code) = (fields.next()?, fields.next()?, fields.next()?);
        let is_whole = fields.next().is_none() && !call.is_empty();
        is_whole.then_some(Failure {
            call: call.to_owned(),
            nth: nth.parse().ok()?,
            code: code.parse().ok()?,
        })
    };
    text.split(',').map(failure).collect()
}

fn compute_capability(text: &str) -> Option<i32> {
    let (major, minor) = text.split_once('.')?;
    let (major, minor): (u8, u8) = (major.parse().ok()?, minor.parse().ok()?);
    (minor < 10).then_some(i32::from(major) * 10 + i32::from(minor))
}

/// How many of the devices a list leaves. They are all alike, so their order does not matter.
fn visible(devices: usize, list: Option<String>) -> usize {
    let Some(list) = list else { return devices };
    let entries = list.split(',').map(|entry| entry.trim().parse::<usize>());
    entries
        .take_while(|entry| entry.as_ref().is_ok_and(|number| *number < devices))
        .count()
}

impl Settings {
    pub(crate) fn read(lookup: Lookup<'_>) -> Result<Self, BadVariable> {
        let text = |name: &str, default: &str| lookup(name).unwrap_or_else(|| default.to_owned());
        let cc = text("FALSE_CUDA_CC", "9.0");
        let clocks = text("FALSE_CUDA_HOST_CLOCKS", "joined");
        let fail = lookup("FALSE_CUDA_FAIL").filter(|text| !text.is_empty());
        let idle_ms: u64 = number(lookup, "FALSE_CUDA_IDLE_MS", 20)?;
        let process = std::process::id().to_string();
        let file = |name: &str| lookup(name).map(|path| PathBuf::from(path.replace("%p", &process)));
        Ok(Self {
            devices: visible(
                number::<u8>(lookup, "FALSE_CUDA_DEVICES", 1)?.into(),
                lookup("CUDA_VISIBLE_DEVICES"),
            ),
            memory_bytes: number(lookup, "FALSE_CUDA_MEMORY_BYTES", 1 << 30)?,
            name: text("FALSE_CUDA_NAME", "False H200"),
            compute_capability: compute_capability(&cc)
                .ok_or_else(|| bad("FALSE_CUDA_CC", &cc, "a compute capability like 9.0"))?,
            version: number(lookup, "FALSE_CUDA_VERSION", 13_000)?,
            seed: number(lookup, "FALSE_CUDA_SEED", 1)?,
            failures: match fail {
                None => Vec::new(),
                Some(text) => {
                    failures(&text).ok_or_else(|| bad("FALSE_CUDA_FAIL", &text, "a list of call:nth:code"))?
                }
            },
            hang: file("FALSE_CUDA_HANG"),
            lost: file("FALSE_CUDA_LOST"),
            steps_max: number(lookup, "FALSE_CUDA_STEPS_MAX", 1 << 33)?,
            host_clocks: match clocks.as_str() {
                "joined" => HostClocks::Joined,
                "separate" => HostClocks::Separate,
                _ => return Err(bad("FALSE_CUDA_HOST_CLOCKS", &clocks, "joined or separate")),
            },
            idle: (idle_ms > 0).then(|| Duration::from_millis(idle_ms)),
            wait_max: Duration::from_millis(number(lookup, "FALSE_CUDA_WAIT_MS_MAX", 120_000)?),
            report: lookup("FALSE_CUDA_REPORT").map(PathBuf::from),
        })
    }

    pub(crate) fn from_environment() -> Result<Self, BadVariable> {
        Self::read(&|name| std::env::var(name).ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(name: &str, value: &str) -> Result<Settings, BadVariable> {
        Settings::read(&|asked| (asked == name).then(|| value.to_owned()))
    }

    #[test]
    fn a_list_of_failures_is_read() {
        let settings = with("FALSE_CUDA_FAIL", "cuMemAllocAsync:2:2,cuInit:1:100").unwrap();
        let call = |call: &str, nth, code| Failure {
            call: call.to_owned(),
            nth,
            code,
        };
        assert_eq!(
            settings.failures,
            [call("cuMemAllocAsync", 2, 2), call("cuInit", 1, 100)]
        );
    }

    #[test]
    fn a_bad_variable_is_named() {
        for (name, value) in [
            ("FALSE_CUDA_FAIL", "cuInit"),
            ("FALSE_CUDA_CC", "90"),
            ("FALSE_CUDA_DEVICES", "-1"),
            ("FALSE_CUDA_HOST_CLOCKS", "mine"),
        ] {
            assert_eq!(with(name, value).unwrap_err().name, name);
        }
    }

    #[test]
    fn a_file_may_be_of_one_process() {
        let hang = with("FALSE_CUDA_HANG", "/t/hang-%p").unwrap().hang;
        assert_eq!(hang, Some(PathBuf::from(format!("/t/hang-{}", std::process::id()))));
    }

    #[test]
    fn an_idle_time_of_zero_means_never() {
        assert_eq!(with("FALSE_CUDA_IDLE_MS", "0").unwrap().idle, None);
        assert_eq!(with("FALSE_CUDA_CC", "12.0").unwrap().compute_capability, 120);
    }
}
