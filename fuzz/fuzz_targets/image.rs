#![no_main]

forebay_fuzz::targets! {
    "rbd_diff" => forebay_image::fuzz::diff,
    "rbd_image_stream" => forebay_image::fuzz::image_stream,
    "rbd_header" => forebay_image::fuzz::header,
    "rbd_messages" => forebay_image::fuzz::messages,
    "rbd_object_map" => forebay_image::fuzz::object_map,
}
