//! `create`, `ls`, `info`, `resize`, `rm`, `mv`, `du`.

use super::with_session;
use crate::api::{self, DiskUsage, ImageInfo};
use crate::cli::{Create, Du, Global, Ls, Mv, OneImage, Resize};
use crate::client::progress::{Bar, Counts};
use crate::failure::{Failure, Result};
use crate::ops::{CreateImage, GetImage, GetUsage, ListImages, RemoveImage, UpdateImage};
use crate::output::{Output, fields, table};
use crate::spec::{ImageSpec, PoolSpec};
use crate::units::Size;

/// Makes an image.
pub fn create(global: &Global, output: Output, options: Create) -> Result<()> {
    let ImageSpec { pool, image } = options.image;
    let request = api::CreateImage { pool, image, size: options.size.0, object_size: options.object_size.0 };
    let info = with_session(global, |session| session.call(CreateImage(request), |_| {}))?;
    output.print(&info, |_| String::new())
}

/// Lists a pool's images.
pub fn ls(global: &Global, output: Output, options: Ls) -> Result<()> {
    let PoolSpec(pool) = options.pool;
    let images = with_session(global, |session| session.call(ListImages { pool }, |_| {}))?;
    if !options.long {
        let names: Vec<String> = images.into_iter().map(|summary| summary.image).collect();
        return output.print(&names, |names| names.join("\n"));
    }
    output.print(&images, |images| {
        let rows = images.iter().map(|image| vec![image.image.clone(), Size(image.size).to_string()]);
        table(&["NAME", "SIZE"], &[1], rows)
    })
}

/// Shows an image.
pub fn info(global: &Global, output: Output, options: OneImage) -> Result<()> {
    let info = with_session(global, |session| session.call(GetImage(options.image), |_| {}))?;
    output.print(&info, describe)
}

fn describe(info: &ImageInfo) -> String {
    fields(&[
        ("image", format!("{}/{}", info.pool, info.name)),
        ("size", format!("{} in {} objects", Size(info.size), info.objects)),
        ("object size", format!("{} (order {})", Size(info.object_size), info.order)),
        ("id", info.id.clone()),
        ("block name prefix", info.block_name_prefix.clone()),
        ("format", info.format.to_string()),
        ("features", info.features.join(", ")),
        ("created", info.create_timestamp.clone().unwrap_or_else(|| "-".into())),
    ])
}

/// Gives an image another size.
pub fn resize(global: &Global, output: Output, options: Resize) -> Result<()> {
    let update = api::UpdateImage {
        size: Some(options.size.0),
        allow_shrink: options.allow_shrink,
        ..api::UpdateImage::default()
    };
    let operation = UpdateImage { spec: options.image, update };
    let bar = Bar::new(global, "Resizing", Counts::Steps);
    let info = with_session(global, |session| session.call(operation, |now| bar.show(now)))?;
    drop(bar);
    output.print(&info, |_| String::new())
}

/// Removes an image.
pub fn rm(global: &Global, output: Output, options: OneImage) -> Result<()> {
    let bar = Bar::new(global, "Removing", Counts::Steps);
    let removed = options.image.clone();
    with_session(global, |session| session.call(RemoveImage(options.image), |now| bar.show(now)))?;
    drop(bar);
    output.print(&removed, |_| String::new())
}

/// Gives an image another name.
pub fn mv(global: &Global, output: Output, options: Mv) -> Result<()> {
    if options.image.pool != options.to.pool {
        let what = format!("{} and {} are in different pools", options.image, options.to);
        return Err(Failure::invalid(what).hint("export the image from one pool and import it into the other"));
    }
    let update = api::UpdateImage { name: Some(options.to.image), ..api::UpdateImage::default() };
    let operation = UpdateImage { spec: options.image, update };
    let info = with_session(global, |session| session.call(operation, |_| {}))?;
    output.print(&info, |_| String::new())
}

/// Shows what images take up.
pub fn du(global: &Global, output: Output, options: Du) -> Result<()> {
    let operation = parse_du(&options.what).map_err(Failure::invalid)?;
    let bar = Bar::new(global, "Counting", Counts::Steps);
    let usage = with_session(global, |session| session.call(operation, |now| bar.show(now)))?;
    drop(bar);
    output.print(&usage, show_usage)
}

/// `POOL/` is a pool, `POOL/IMAGE` and `IMAGE` are an image.
fn parse_du(what: &str) -> std::result::Result<GetUsage, String> {
    if what.ends_with('/') {
        let PoolSpec(pool) = what.parse()?;
        return Ok(GetUsage { pool, image: None });
    }
    let ImageSpec { pool, image } = what.parse()?;
    Ok(GetUsage { pool, image: Some(image) })
}

fn show_usage(usage: &DiskUsage) -> String {
    let row =
        |name: &str, provisioned, used| vec![name.to_owned(), Size(provisioned).to_string(), Size(used).to_string()];
    let mut rows: Vec<_> =
        usage.images.iter().map(|image| row(&image.name, image.provisioned_size, image.used_size)).collect();
    if rows.len() != 1 {
        rows.push(row("<TOTAL>", usage.total_provisioned_size, usage.total_used_size));
    }
    table(&["NAME", "PROVISIONED", "USED"], &[1, 2], rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_du_is_asked_about() {
        let parse = |what| parse_du(what).map(|usage| (usage.pool, usage.image));
        assert_eq!(parse("ram/"), Ok(("ram".into(), None)));
        assert_eq!(parse("ram/x"), Ok(("ram".into(), Some("x".into()))));
        assert_eq!(parse("x"), Ok(("local".into(), Some("x".into()))));
        assert!(parse("/").is_err());
    }
}
