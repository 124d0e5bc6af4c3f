//! One scrape of `/metrics`: OpenMetrics text parsed into samples that are found by name and labels.

use std::collections::BTreeMap;

use anyhow::Context;

/// All samples of one scrape, in the order of the text.
#[derive(Clone, Debug, Default)]
pub struct Scrape {
    samples: Vec<Sample>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// The name as exposed: a counter ends in `_total`, a histogram's parts in `_bucket`, `_sum`, `_count`.
    pub name: String,
    pub labels: BTreeMap<String, String>,
    pub value: f64,
}

impl Scrape {
    pub fn parse(text: &str) -> anyhow::Result<Self> {
        let samples = text
            .lines()
            .filter(|line| !line.trim().is_empty() && !line.starts_with('#'))
            .map(|line| Sample::parse(line).with_context(|| format!("metrics line {line:?}")))
            .collect::<anyhow::Result<_>>()?;
        Ok(Self { samples })
    }

    pub fn samples(&self) -> &[Sample] {
        &self.samples
    }

    /// Samples of `name` whose labels include all of `labels`.
    pub fn matching<'a>(&'a self, name: &'a str, labels: &'a [(&str, &str)]) -> impl Iterator<Item = &'a Sample> {
        self.samples
            .iter()
            .filter(move |sample| sample.name == name && sample.has(labels))
    }

    /// The sum over all samples of `name` with `labels`. `None` when there is no sample, which is not the same as zero.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let mut found = self.matching(name, labels).peekable();
        found.peek()?;
        Some(found.map(|sample| sample.value).sum())
    }
}

impl Sample {
    pub fn label(&self, name: &str) -> Option<&str> {
        self.labels.get(name).map(String::as_str)
    }

    fn has(&self, labels: &[(&str, &str)]) -> bool {
        labels.iter().all(|(name, value)| self.label(name) == Some(value))
    }

    fn parse(line: &str) -> anyhow::Result<Self> {
        let name_end = line.find(['{', ' ']).context("no value")?;
        let (name, rest) = line.split_at(name_end);
        let (labels, rest) = match rest.strip_prefix('{') {
            Some(rest) => parse_labels(rest)?,
            None => (BTreeMap::new(), rest),
        };
        // A timestamp or an exemplar may follow the value.
        let value = rest.split_whitespace().next().context("no value")?;
        let value = match value {
            "+Inf" => f64::INFINITY,
            "-Inf" => f64::NEG_INFINITY,
            number => number.parse().context("the value is not a number")?,
        };
        Ok(Self {
            name: name.to_owned(),
            labels,
            value,
        })
    }
}

/// Parses `a="b",c="d"} rest` (without the opening brace). Returns the labels and the rest.
fn parse_labels(mut text: &str) -> anyhow::Result<(BTreeMap<String, String>, &str)> {
    let mut labels = BTreeMap::new();
    loop {
        text = text.trim_start_matches(',');
        if let Some(rest) = text.strip_prefix('}') {
            return Ok((labels, rest));
        }
        let (name, rest) = text.split_once("=\"").context("a label without a value")?;
        let mut value = String::new();
        let mut escaped = false;
        let mut end = None;
        for (at, c) in rest.char_indices() {
            match (escaped, c) {
                (true, 'n') => value.push('\n'),
                (true, other) => value.push(other),
                (false, '\\') => {}
                (false, '"') => {
                    end = Some(at + 1);
                    break;
                }
                (false, other) => value.push(other),
            }
            escaped = !escaped && c == '\\';
        }
        text = &rest[end.context("a label value without an end")?..];
        labels.insert(name.to_owned(), value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# HELP baton_kv_blocks Blocks by state.\n# TYPE baton_kv_blocks gauge\n\
        baton_kv_blocks{node=\"decode-0\",state=\"free\"} 10\nbaton_kv_blocks{node=\"decode-0\",state=\"active\"} 2\n\
        baton_kv_blocks{node=\"p\\\"0\",state=\"active\"} 3\nbaton_requests_total 7\n\
        ttft_seconds_bucket{le=\"+Inf\"} 4 # {trace=\"x\"} 1.0\nratio 1.5e-3\n# EOF\n";

    #[test]
    fn samples_are_found_by_name_and_any_subset_of_labels() {
        let scrape = Scrape::parse(TEXT).expect("valid text");
        assert_eq!(scrape.sum("baton_kv_blocks", &[("state", "active")]), Some(5.0));
        assert_eq!(
            scrape.sum("baton_kv_blocks", &[("node", "decode-0"), ("state", "free")]),
            Some(10.0)
        );
        assert_eq!(scrape.sum("baton_kv_blocks", &[("node", "p\"0")]), Some(3.0));
        assert_eq!(scrape.sum("baton_requests_total", &[]), Some(7.0));
        assert_eq!(scrape.sum("ttft_seconds_bucket", &[("le", "+Inf")]), Some(4.0));
        assert_eq!(scrape.sum("ratio", &[]), Some(0.0015));
    }

    #[test]
    fn an_absent_series_is_not_zero() {
        let scrape = Scrape::parse(TEXT).expect("valid text");
        assert_eq!(scrape.sum("baton_kv_blocks", &[("state", "quarantined")]), None);
    }

    #[test]
    fn a_broken_line_is_named() {
        let error = Scrape::parse("a 1\nb{c=\"d} 2\n").expect_err("the label has no end");
        assert!(format!("{error:#}").contains("b{c="), "{error:#}");
    }
}
