//! The model: is it here, whole and one that this build runs, and does a cluster of it fit this machine.

use std::path::{Path, PathBuf};

use model_files::model::Model;

use super::finding::{Finding, Group};
use crate::local_cluster::LocalClusterOptions;
use crate::model::{FoundModel, find};
use crate::topology::Topology;

/// What `baton up` starts without flags.
const USUAL_TOPOLOGY: Topology = Topology::Disaggregated {
    prefill_count: 1,
    decode_count: 1,
};

pub(super) fn look(asked: &Path) -> Vec<Finding> {
    let name = asked.display().to_string();
    match find(&name) {
        Ok(Some(found)) => of_found(&name, &found),
        Ok(None) => vec![Group::Model.warn(
            "file",
            format!("{name} is not on this machine"),
            format!("baton model pull {name}, or let `baton up` fetch it"),
        )],
        Err(error) => vec![Group::Model.fail(
            "file",
            format!("{name}: {error}"),
            "baton model list shows the models that are known and those that are here",
        )],
    }
}

fn of_found(name: &str, found: &FoundModel) -> Vec<Finding> {
    let mut findings = vec![of_checksum(name, found)];
    let shown = found.path.display();
    let model = match Model::open(&found.path) {
        Ok(model) => model,
        Err(error) => {
            findings.push(Group::Model.fail(
                "readable",
                format!("{shown}: {error}"),
                "give another with --model, or fetch this one again",
            ));
            return findings;
        }
    };
    let parameters = model.parameter_count().unwrap_or(0);
    let architecture = model.config().architecture.name;
    let seen = format!(
        "{architecture}, {} million parameters: {shown}",
        parameters.div_ceil(1_000_000)
    );
    findings.push(Group::Model.ok("readable", seen));
    findings.push(match model.tokenizer() {
        Ok(tokenizer) => Group::Model.ok("tokenizer", format!("{} tokens", tokenizer.vocab_size())),
        Err(error) => Group::Model.fail(
            "tokenizer",
            error.to_string(),
            "take a model with a tokenizer that this build knows (docs/reference/models.md)",
        ),
    });
    findings.push(of_cluster(found.path.clone()));
    findings
}

fn of_checksum(name: &str, found: &FoundModel) -> Finding {
    let shown = found.path.display();
    match found.is_intact() {
        Ok(None) => Group::Model.ok("checksum", "none is known of this model"),
        Ok(Some(true)) => Group::Model.ok("checksum", "SHA-256 as in the catalogue"),
        Ok(Some(false)) => Group::Model.fail(
            "checksum",
            format!("{shown} has changed since it was fetched"),
            format!("baton model pull --force {name}"),
        ),
        Err(error) => Group::Model.fail(
            "checksum",
            format!("{shown} cannot be read: {error}"),
            "check who may read the file",
        ),
    }
}

/// Whether the processes of `baton up` would take the model, with the settings of this environment.
fn of_cluster(path: PathBuf) -> Finding {
    // Nothing is started, so no program is needed.
    let options = LocalClusterOptions::new(PathBuf::new(), USUAL_TOPOLOGY, path);
    let checked = options
        .check_settings()
        .and_then(|()| options.check_model())
        .map_err(anyhow::Error::from)
        .and_then(|notes| {
            options.check_memory()?;
            Ok(notes)
        });
    match checked {
        Ok(notes) if notes.is_empty() => {
            Group::Model.ok("cluster", format!("{USUAL_TOPOLOGY} of it fits this machine"))
        }
        Ok(notes) => Group::Model.warn(
            "cluster",
            notes.join("; "),
            "give more with --kv-cache-memory, if requests are that long",
        ),
        Err(error) => Group::Model.fail(
            "cluster",
            format!("{USUAL_TOPOLOGY} of it does not start: {error:#}"),
            "mend what it says, or take a smaller model: baton model inspect MODEL shows what one needs",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Verdict;
    use super::*;
    use model_files::test_kit::TinyModel;

    fn verdicts(findings: &[Finding]) -> Vec<(&'static str, Verdict)> {
        findings
            .iter()
            .map(|finding| (finding.check, finding.verdict))
            .collect()
    }

    #[test]
    fn a_model_that_is_here_and_runs_is_ok_and_a_broken_or_missing_one_fails() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("tiny.gguf");
        TinyModel::default()
            .build()
            .write(&path)
            .expect("room for a tiny model");
        let checks = ["checksum", "readable", "tokenizer", "cluster"];
        assert_eq!(verdicts(&look(&path)), checks.map(|check| (check, Verdict::Ok)));
        std::fs::write(&path, b"this is not a model").expect("written");
        assert_eq!(verdicts(&look(&path))[1], ("readable", Verdict::Fail));
        let missing = look(&folder.path().join("none.gguf"));
        assert_eq!(verdicts(&missing), [("file", Verdict::Fail)]);
    }

    #[test]
    fn a_changed_file_of_the_catalogue_fails() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("model.gguf");
        std::fs::write(&path, b"x").expect("written");
        let found = FoundModel {
            path,
            sha256: Some("00"),
        };
        let finding = of_checksum("smollm2-135m", &found);
        assert_eq!(finding.verdict, Verdict::Fail);
        assert!(
            finding
                .to_do
                .is_some_and(|to_do| to_do.contains("pull --force smollm2-135m"))
        );
    }
}
