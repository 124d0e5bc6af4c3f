//! Where a run took place: machine, versions, flags, model, and who else used the machine.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use workload::trace::own_format;

use super::plan::{Endpoint, LoadPlan, Pace, Prompts};
use super::processes;
use super::target::Target;

/// Ends of the names of flags whose values are not shown.
const SECRETS: [&str; 5] = ["header", "key", "secret", "password", "token"];

/// Facts of this machine at this moment.
pub(crate) fn machine() -> BTreeMap<String, Value> {
    let memory = text("/proc/meminfo");
    let memory = memory.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let memory = memory.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok());
    let load: Vec<f64> = text("/proc/loadavg")
        .split_whitespace()
        .take(3)
        .filter_map(|word| word.parse().ok())
        .collect();
    let governor = text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor");
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    BTreeMap::from_iter([
        ("client_version".to_owned(), json!(crate::version::VERSION)),
        ("client_commit".to_owned(), json!(coordinator::BUILD_COMMIT)),
        ("client_build".to_owned(), json!(coordinator::BUILD_PROFILE)),
        ("client_command".to_owned(), json!(own_command_line())),
        ("client_pid".to_owned(), json!(std::process::id())),
        ("client_nice".to_owned(), json!(nice())),
        ("host".to_owned(), json!(text("/proc/sys/kernel/hostname").trim())),
        ("kernel".to_owned(), json!(text("/proc/sys/kernel/osrelease").trim())),
        ("cpu_model".to_owned(), json!(cpu_model())),
        (
            "cores".to_owned(),
            json!(std::thread::available_parallelism().map_or(0, usize::from)),
        ),
        ("cpu_governor".to_owned(), json!(some(governor.trim()))),
        ("memory_bytes".to_owned(), json!(memory.map(|kib| kib << 10))),
        ("load_average".to_owned(), json!(load)),
        ("started_unix_ms".to_owned(), json!(now.as_millis() as u64)),
        (
            "gpus".to_owned(),
            gpus(
                "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks_throttle_reasons.active,utilization.gpu",
            ),
        ),
        (
            "gpu_processes".to_owned(),
            gpus("--query-compute-apps=pid,process_name,used_memory"),
        ),
    ])
}

/// Memory of this process that is in use now. `None`: the system does not tell.
pub(crate) fn resident_bytes() -> Option<u64> {
    let status = text("/proc/self/status");
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kibibytes: u64 = resident.trim().trim_end_matches(" kB").parse().ok()?;
    Some(kibibytes << 10)
}

/// The processor's name. `None`: the system does not tell.
pub(crate) fn cpu_model() -> Option<String> {
    let cpu = text("/proc/cpuinfo");
    let model = cpu.lines().find_map(|line| line.strip_prefix("model name"))?;
    Some(model.trim_start_matches([' ', '\t', ':']).trim_end().to_owned())
}

/// What the plan says, as the reports show it. Headers and keys may be secrets and are left out.
pub(super) fn of_plan(plan: &LoadPlan, target: &Target) -> BTreeMap<String, Value> {
    let (loop_name, limit) = match plan.pace {
        Pace::Open { max_concurrency } => ("open", max_concurrency),
        Pace::Closed { users } => ("closed", Some(users)),
    };
    let prompts = match (&plan.prompts, plan.server.endpoint) {
        (Prompts::TokenIds, Endpoint::Completions) => "random token ids",
        (Prompts::TokenIds | Prompts::Words, _) => "random words",
        (Prompts::Given(_), _) => "texts of a file",
    };
    let endpoint = match plan.server.endpoint {
        Endpoint::Completions => "completions",
        Endpoint::Chat => "chat",
    };
    BTreeMap::from_iter([
        ("url".to_owned(), json!(without_login(&plan.server.url))),
        ("endpoint".to_owned(), json!(endpoint)),
        ("model".to_owned(), json!(target.model)),
        ("models".to_owned(), target.models.clone()),
        ("server_software".to_owned(), json!(target.software)),
        ("trace".to_owned(), json!(plan.trace.name)),
        ("trace_hash".to_owned(), json!(own_format::hash(&plan.trace))),
        ("requests".to_owned(), json!(plan.trace.requests.len())),
        ("prompts".to_owned(), json!(prompts)),
        ("loop".to_owned(), json!(loop_name)),
        ("max_concurrency".to_owned(), json!(limit)),
        ("warm_up_requests".to_owned(), json!(plan.warm_up_requests)),
        ("warm_up_s".to_owned(), json!(plan.warm_up.as_secs_f64())),
        ("cool_down_s".to_owned(), json!(plan.cool_down.as_secs_f64())),
        ("ignore_eos".to_owned(), json!(plan.ignore_eos)),
        ("cancel_rate".to_owned(), json!(plan.cancel_rate)),
        (
            "request_timeout_s".to_owned(),
            json!(plan.request_timeout.as_secs_f64()),
        ),
        ("seed".to_owned(), json!(plan.seed)),
        ("sampling".to_owned(), json!(plan.extra_body)),
    ])
}

/// The words that this process was started with.
fn own_command_line() -> String {
    without_secrets(std::env::args_os().map(|word| word.to_string_lossy().into_owned()))
}

/// The words that a process of this machine was started with. `None`: it has ended, or this user may not read them.
pub(crate) fn command_line(pid: u32) -> Option<String> {
    Some(without_secrets(processes::command(pid)?))
}

/// A command line. The values of flags that name a secret are left out (such a flag may have several of them), and logins in addresses.
fn without_secrets(words: impl IntoIterator<Item = String>) -> String {
    let mut shown = Vec::new();
    let mut is_secret = false;
    for word in words {
        is_secret = is_secret && !word.starts_with("--");
        let (flag, value) = word
            .split_once('=')
            .map_or((word.as_str(), None), |(flag, value)| (flag, Some(value)));
        let names_secret = flag.starts_with("--") && SECRETS.iter().any(|name| flag.ends_with(name));
        shown.push(match (is_secret, names_secret, value) {
            (true, _, _) => "***".to_owned(),
            (false, true, Some(_)) => format!("{flag}=***"),
            _ => without_login(&word),
        });
        is_secret = is_secret || (names_secret && value.is_none());
    }
    shown.join(" ")
}

/// A word without the name and the password that an address, such as that of etcd, may have before its host.
pub(crate) fn without_login(word: &str) -> String {
    let Some((scheme, rest)) = word.split_once("://") else {
        return word.to_owned();
    };
    // An @ behind the host is no login: `hf://org/name@revision`.
    let host_end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    match rest[..host_end].rfind('@') {
        Some(at) => format!("{scheme}://***{}", &rest[at..]),
        None => word.to_owned(),
    }
}

fn text(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

fn some(text: &str) -> Option<&str> {
    (!text.is_empty()).then_some(text)
}

/// Field 19 of proc(5)'s stat: -20 is served first, 19 last.
fn nice() -> Option<i64> {
    let stat = text("/proc/self/stat");
    let (_, fields) = stat.rsplit_once(") ")?;
    fields.split_whitespace().nth(16)?.parse().ok()
}

/// The lines of `nvidia-smi`, or null where there is no such program.
fn gpus(query: &str) -> Value {
    let output = Command::new("nvidia-smi")
        .args([query, "--format=csv,noheader"])
        .output();
    let output = output.ok().filter(|output| output.status.success());
    output.map_or(Value::Null, |output| {
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        json!(
            text.lines()
                .map(str::trim)
                .filter(|line| !line.is_empty())
                .collect::<Vec<_>>()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_line_shows_no_secret() {
        for (line, shown) in [
            (
                "serve --api-key s1 --hf-token=s2 --max-num-tokens=8 --port 80",
                "serve --api-key *** --hf-token=*** --max-num-tokens=8 --port 80",
            ),
            ("run --header A=s1 B=s2 --users 3", "run --header *** *** --users 3"),
            (
                "serve --coordinators=etcds://u:s1@h:2379/demo?ca=x --membership etcd://u:s@2@h/c --url http://h:1/v1",
                "serve --coordinators=etcds://***@h:2379/demo?ca=x --membership etcd://***@h/c --url http://h:1/v1",
            ),
            (
                "serve --model=hf://org/name@main http://h/v1?to=a@b",
                "serve --model=hf://org/name@main http://h/v1?to=a@b",
            ),
        ] {
            assert_eq!(without_secrets(line.split(' ').map(str::to_owned)), shown);
        }
    }
}
