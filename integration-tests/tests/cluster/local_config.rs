//! `deploy/local/*.toml` hold every key of the config structs with its default, and no other key.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Stdio;

use anyhow::{Context, ensure};
use integration_tests::cluster::baton_executable;
use tokio::process::Command;

const PROCESSES: [(&str, &str); 3] = [
    ("serve-coordinator", "coordinator"),
    ("serve-prefill", "prefill"),
    ("serve-decode", "decode"),
];

/// 25 were enough until the coordinator had to say who may ask it, what a cluster without prefill nodes counts as, where traces
/// are viewed and whether they have content, by which profiles requests are judged, which keys clients have, where operators ask,
/// and by which certificate the other processes know it. Two more are the certificate that clients see and its key: it is another
/// one, mostly of another authority.
const KEYS_MAX: usize = 43;

fn example(name: &str) -> PathBuf {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    root.join("deploy/local").join(format!("{name}.toml"))
}

fn command(verb: &str) -> anyhow::Result<Command> {
    let mut command = Command::new(baton_executable()?);
    // What the person running the tests has set must not show up as an origin.
    for (key, _) in std::env::vars_os().filter(|(key, _)| key.to_string_lossy().starts_with("BATON_")) {
        command.env_remove(key);
    }
    command.arg(verb).stdin(Stdio::null()).kill_on_drop(true);
    Ok(command)
}

async fn printed_config(verb: &str, flags: &[String]) -> anyhow::Result<String> {
    let output = command(verb)?
        .args(flags)
        .arg("--model=m.gguf")
        .arg("--print-config")
        .output()
        .await?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{verb} {flags:?}: {}: {said}", output.status);
    Ok(String::from_utf8(output.stdout)?)
}

/// Key to value, without its origin; keys that are not set are there with `None`.
fn keys(printed: &str) -> BTreeMap<String, Option<String>> {
    let not_set = |line: &str| Some(line.strip_prefix("# ")?.strip_suffix(" is not set")?.to_owned());
    let set = |line: &str| {
        let (key, value) = line
            .rsplit_once("  # ")
            .map_or(line, |(setting, _)| setting)
            .split_once(" = ")?;
        Some((key.to_owned(), Some(value.to_owned())))
    };
    printed
        .lines()
        .filter_map(|line| not_set(line).map(|key| (key, None)).or_else(|| set(line)))
        .collect()
}

/// Keys of the example, commented out or not: `key = value` and `# key = value`.
fn example_keys(text: &str) -> BTreeMap<String, bool> {
    let is_key = |key: &str| {
        !key.is_empty()
            && key
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b == b'_' || b.is_ascii_digit())
    };
    let of_line = |line: &str| {
        let (key, _) = line.trim_start_matches("# ").split_once(" = ")?;
        is_key(key).then(|| (key.to_owned(), !line.starts_with('#')))
    };
    text.lines().filter_map(of_line).collect()
}

#[tokio::test]
async fn the_examples_hold_every_key_with_its_default() -> anyhow::Result<()> {
    for (verb, name) in PROCESSES {
        let path = example(name);
        let defaults = keys(&printed_config(verb, &[]).await?);
        let from_file = keys(&printed_config(verb, &[format!("--config={}", path.display())]).await?);
        let in_file = example_keys(&std::fs::read_to_string(&path)?);
        ensure!(defaults.len() > 10, "{verb} prints only {defaults:?}");
        for (key, default) in &defaults {
            let is_set = in_file
                .get(key)
                .with_context(|| format!("{name}.toml does not have `{key}`"))?;
            // Nodes have no default name for the model; the example must agree with the coordinator's.
            let may_differ = key == "served_model_name" || key == "model";
            ensure!(
                may_differ || from_file.get(key) == Some(default),
                "{name}.toml changes the default of `{key}`: {default:?}"
            );
            ensure!(
                *is_set == default.is_some() || may_differ,
                "{name}.toml: `{key}` must be set exactly if it has a default"
            );
        }
        let unknown: Vec<&String> = in_file.keys().filter(|key| !defaults.contains_key(*key)).collect();
        ensure!(
            unknown.is_empty(),
            "{name}.toml holds keys that {verb} does not have: {unknown:?}"
        );
        ensure!(
            defaults.len() <= KEYS_MAX,
            "{verb} has {} keys, at most {KEYS_MAX}: can one of them go?",
            defaults.len()
        );
    }
    Ok(())
}

#[tokio::test]
async fn a_wrong_file_is_refused_with_its_key_and_status_2() -> anyhow::Result<()> {
    let file = std::env::temp_dir().join(format!("baton-wrong-{}.toml", std::process::id()));
    std::fs::write(&file, "max_num_seq = 4\n")?;
    let output = command("serve-decode")?.arg("--config").arg(&file).output().await?;
    std::fs::remove_file(&file)?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(
        said.contains("max_num_seq") && said.contains("did you mean `max_num_seqs`"),
        "{said}"
    );
    Ok(())
}
